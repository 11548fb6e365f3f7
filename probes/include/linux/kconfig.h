/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
#pragma once
#define CONFIG_BPF_SYSCALL 1
#define CONFIG_TRACEPOINTS 1
