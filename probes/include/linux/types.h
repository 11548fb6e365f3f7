/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/* bcc includes a few kernel headers in every module.  These stand in for them, so that a machine
 * needs neither kernel headers nor a build tree: see README.md beside this tree. */
#pragma once

typedef signed char __s8;
typedef unsigned char __u8;
typedef short __s16;
typedef unsigned short __u16;
typedef int __s32;
typedef unsigned int __u32;
typedef long long __s64;
typedef unsigned long long __u64;

typedef __s8 s8;
typedef __u8 u8;
typedef __s16 s16;
typedef __u16 u16;
typedef __s32 s32;
typedef __u32 u32;
typedef __s64 s64;
typedef __u64 u64;

typedef __u16 __be16;
typedef __u32 __be32;
typedef __u64 __be64;
typedef __u16 __le16;
typedef __u32 __le32;
typedef __u64 __le64;
typedef __u16 __sum16;
typedef __u32 __wsum;

typedef _Bool bool;
typedef unsigned long size_t;
typedef long ssize_t;
typedef int pid_t;
typedef unsigned int gid_t;
typedef unsigned int uid_t;
typedef unsigned short umode_t;
typedef unsigned int dev_t;
typedef long long loff_t;
typedef unsigned long uintptr_t;
#define __aligned_u64 __u64 __attribute__((aligned(8)))

#ifndef NULL
#define NULL ((void *)0)
#endif
enum { false = 0, true = 1 };

#define __bitwise
#define __user
#define __kernel
#define __attribute_const__ __attribute__((const))
