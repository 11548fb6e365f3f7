/* sleepers N: N idle processes, until standard input ends; says "up" once they are there.
 * sleepers N RATE: and so many programs a second are started, one after another, meanwhile. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <poll.h>
#include <unistd.h>

static void start_one(void)
{
    pid_t pid = vfork();
    if (pid == 0) {
        execl("/bin/true", "true", (char *)0);
        _exit(1);
    }
    if (pid > 0)
        waitpid(pid, 0, 0);
}

int main(int argc, char **argv)
{
    int n = argc > 1 ? atoi(argv[1]) : 0, rate = argc > 2 ? atoi(argv[2]) : 0;
    pid_t parent = getpid();

    for (int i = 0; i < n; i++) {
        pid_t pid = fork();
        if (pid < 0) {
            perror("fork");
            kill(0, SIGTERM);
            return 1;
        }
        if (pid == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            if (getppid() != parent)
                _exit(1);
            for (;;)
                pause();
        }
    }
    puts("up");
    fflush(stdout);
    struct pollfd in = {.fd = 0, .events = POLLIN};
    while (poll(&in, 1, rate ? 1000 / rate : -1) == 0)
        start_one();
    return 0; /* the children are killed with us */
}
