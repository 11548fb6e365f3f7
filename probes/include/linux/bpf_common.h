/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/* bcc asks for this header; nothing in it is needed. */
#pragma once
