// SPDX-License-Identifier: Apache-2.0
// flood ADDRESS PORT SECONDS PAYLOAD CPU [PER_SECOND]
// Sends UDP datagrams of PAYLOAD bytes as fast as one CPU can (or PER_SECOND of them), and prints
// how many it sent and in how many seconds. Bounded by time; PER_SECOND 0 means no other bound.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

enum { BATCH = 64, MAX_PAYLOAD = 1400, MAX_SECONDS = 60 };

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec * 1e-9;
}

int main(int argc, char **argv)
{
	if (argc < 6) {
		fprintf(stderr, "usage: flood ADDRESS PORT SECONDS PAYLOAD CPU [PER_SECOND]\n");
		return 2;
	}
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(atoi(argv[2])) };
	double seconds = atof(argv[3]);
	int payload = atoi(argv[4]), cpu = atoi(argv[5]);
	double rate = argc > 6 ? atof(argv[6]) : 0;
	if (inet_pton(AF_INET, argv[1], &to.sin_addr) != 1 || seconds <= 0 ||
	    seconds > MAX_SECONDS || payload < 1 || payload > MAX_PAYLOAD) {
		fprintf(stderr, "flood: bad address, time or size\n");
		return 2;
	}
	cpu_set_t set;
	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	if (cpu >= 0 && sched_setaffinity(0, sizeof(set), &set)) {
		perror("sched_setaffinity");
		return 1;
	}
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	if (fd < 0 || connect(fd, (struct sockaddr *)&to, sizeof(to))) {
		perror("connect");
		return 1;
	}
	char bytes[MAX_PAYLOAD];
	memset(bytes, 'x', sizeof(bytes));
	struct iovec iov = { bytes, payload };
	struct mmsghdr batch[BATCH];
	memset(batch, 0, sizeof(batch));
	for (int i = 0; i < BATCH; i++) {
		batch[i].msg_hdr.msg_iov = &iov;
		batch[i].msg_hdr.msg_iovlen = 1;
	}
	unsigned long long sent = 0;
	double start = now(), t = start;
	while (t - start < seconds) {
		int n = sendmmsg(fd, batch, BATCH, 0);
		if (n > 0)
			sent += n;
		t = now();
		double ahead = rate > 0 ? sent / rate - (t - start) : 0;
		if (ahead > 0) {
			struct timespec nap = { (time_t)ahead, (long)((ahead - (long)ahead) * 1e9) };
			nanosleep(&nap, NULL);
			t = now();
		}
	}
	printf("%llu %.9f\n", sent, t - start);
	return 0;
}
