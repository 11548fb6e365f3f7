/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/* bcc brings its own copy of the BPF ABI and only needs the types here. */
#pragma once
#include <linux/types.h>
