/* A library whose function is called by an interpreter. */
#include "snapshot.h"

int snap(void)
{
	take_snapshot();
	return 1;
}
