/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
#pragma once
#define roundup_pow_of_two(n) (1UL << (64 - __builtin_clzl((unsigned long)(n) - 1)))
