/* What the two C parts of a mount share: the session, its file, and the requests.
 *
 * `_passthrough.c` owns all of it and explains it. `_fast_open.c` answers some requests in a thread
 * of its own, so each function here says which threads may call it.
 */
#ifndef KVFS_SESSION_H
#define KVFS_SESSION_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <linux/fuse.h>
#include <stdint.h>
#include <sys/types.h>

#define UNIQUE_RESEND (1ull << 63) /* in a request that the predecessor may have carried out */
#define REPLY_DIRECT_IO (1u << 0)  /* open_flags */
#define REPLY_KEEP_CACHE (1u << 1)
#define REPLY_NOFLUSH (1u << 5)
#define REPLY_PASSTHROUGH (1u << 7)
enum { OPEN_BACKING_ID = 12 }; /* in struct fuse_open_out, once 'padding' */

#define SLOTS (1u << 20) /* file handles, and backing ids */

/* The life of a slot, in the order in which the session file sees it. The next daemon finds
 *   BOUND      the reply was not sent: the kernel resends the request, or its sender is dead
 *   ANSWERING  the reply may have been sent (one slot for each thread at most)
 *   OPEN       the kernel has the handle, and will send its RELEASE
 *   RELEASING  RELEASE is being carried out; the number is not given out again before its reply */
enum state { FREE, BOUND, ANSWERING, OPEN, RELEASING };

struct slot { /* of a file handle; its number is the index */
    uint64_t inode;
    uint64_t request;   /* unique of the OPEN or CREATE */
    int32_t backing_id; /* 0: the daemon serves this handle itself */
    uint8_t state;
    uint8_t open_flags;
    uint8_t writable;
    uint8_t tier;
};

/* Any thread. */
void session_set_state(struct slot *slot, enum state state);
/* Any thread; each slot has one that changes it. Grows the part of the file that has slots. */
struct slot *session_slot(uint64_t handle);
/* Any thread: one request of the device, into pages that are present, landing->bytes. As read(2). */
struct landing {
    char *bytes;
    size_t size;
};
ssize_t session_land(int fd, struct landing *landing, size_t length);
/* Any thread: whether the question for security.capability was answered. */
int session_no_capability(int fd, const struct fuse_in_header *in, ssize_t length);
int session_device(void);

/* `_fast_open.c`, for the loop's thread. */
extern PyMethodDef fast_open_methods[];
/* The descriptor that is readable when fast_open_receive has a request; -1: the device is. */
int fast_open_wakes(void);
/* Makes the table, which is off. If that fails, fast_on says so. */
void fast_open_start(int device);
/* One request that is not answered here, as read(2) of a device that does not wait. */
ssize_t fast_open_receive(void *buffer, size_t length);
/* When the kernel gave the last one of these, in ns of CLOCK_MONOTONIC. */
int64_t fast_open_came(void);
/* Waits for a request so many ns. Whether fast_open_receive has one. If not, the loop is to sleep. */
int fast_open_await(int64_t patience);
/* Whether no request is unread or in the queue. */
int fast_open_idle(void);

/* `_fast_lookup.c`. */
extern PyMethodDef fast_lookup_methods[];
/* Any thread: whether a LOOKUP asks for a name that its directory does not have. */
int fast_lookup_absent(const struct fuse_in_header *in, ssize_t length);

#endif
