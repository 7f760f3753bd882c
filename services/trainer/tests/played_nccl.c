/* NCCL's C interface over processes that are not there: what it is called with is kept, groups have one rank.
   The declarations are those of nccl.h 2.28 as far as they matter to a caller: sizes, order, what is by value. */
#include <stddef.h>
#include <string.h>

typedef struct { char internal[128]; } ncclUniqueId;
typedef struct played { ncclUniqueId id; int world_size, rank; } *ncclComm_t;

static struct played joined;
static char last[256];
long long seen[6];

int ncclGetVersion(int *version) { *version = 22809; return 0; }

int ncclGetUniqueId(ncclUniqueId *id) {
  for (int i = 0; i < 128; i++) id->internal[i] = (char)(i * 3);
  return 0;
}

int ncclCommInitRank(ncclComm_t *comm, int world_size, ncclUniqueId id, int rank) {
  if (world_size > 1) { strcpy(last, "Multiple Ranks are using the same GPU"); return 5; }
  joined = (struct played){id, world_size, rank};
  *comm = &joined;
  return 0;
}

static int carried(const void *from, void *to, size_t bytes, ncclComm_t comm, void *stream) {
  if (comm != &joined) return 4;
  seen[3] = (long long)(size_t)stream;
  memmove(to, from, bytes);
  return 0;
}

int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, ncclComm_t comm, void *stream) {
  seen[0] = (long long)count; seen[1] = type; seen[2] = op;
  return carried(from, to, count * (type == 7 ? 4 : 1), comm, stream);
}

int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, ncclComm_t comm, void *stream) {
  seen[0] = (long long)count; seen[1] = type; seen[2] = root;
  return carried(from, to, count * (type == 7 ? 4 : 1), comm, stream);
}

int ncclCommAbort(ncclComm_t comm) { seen[4] = comm == &joined; seen[5]++; return 0; }

const char *ncclGetErrorString(int result) { return result == 5 ? "invalid usage" : "invalid argument"; }

const char *ncclGetLastError(ncclComm_t comm) { return comm ? "" : last; }

int joined_by(const char *id, int world_size, int rank) {
  return !memcmp(joined.id.internal, id, 128) && joined.world_size == world_size && joined.rank == rank;
}
