/* Kernel passthrough and takeover for an unmodified pyfuse3 on a stock libfuse (>= 3.14).
 *
 * Imported with RTLD_GLOBAL before pyfuse3, this module's fuse_session_mount is the one that
 * pyfuse3 calls. It hands libfuse our read and writev through its public custom-io call; all that
 * they change is three replies of the kernel's public ABI (linux/fuse.h):
 *   INIT          asks for FUSE_PASSTHROUGH, FUSE_HANDLE_KILLPRIV_V2, FUSE_HAS_RESEND and FUSE_DIRECT_IO_ALLOW_MMAP,
 *                 where the kernel offers them
 *   OPEN, CREATE  carry the backing id and flags that bind() gave for the reply's file handle
 *
 * What the next daemon must know if this one dies at any instruction is in the session file, which
 * is mapped: the kernel's INIT, a slot for each file handle, and the backing ids that are open. A
 * store there is one that death cannot undo, so their order is the point; `enum state` has it.
 *
 * Everything here runs in the daemon's one loop thread, under the GIL. Two threads are the exceptions:
 * `notify` tells the kernel of names that are gone, and `_fast_open.c` has one that reads requests.
 * Not for mounting: the keeper does that.
 */
#include "_session.h"
#include "_set.h"

#define FUSE_USE_VERSION 314
#include <errno.h>
#include <fuse3/fuse_lowlevel.h>
#include <linux/close_range.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

/* Younger than Debian 12's linux/fuse.h; the values are those of the kernel's uapi header. */
struct backing_map {
    int32_t fd;
    uint32_t flags;
    uint64_t padding;
};
#define BACKING_OPEN _IOW(229, 1, struct backing_map)
#define BACKING_CLOSE _IOW(229, 2, uint32_t)
#define INIT_FLAGS_EXT (1u << 30)    /* flags */
/* kvfs clears set-id bits itself. Without this the kernel asks for security.capability before each
 * write(2): a round trip, measured at half the speed of 1 MiB writes. */
#define HANDLE_KILLPRIV_V2 (1u << 28)
#define FLAGS2_DIRECT_IO_ALLOW_MMAP (1u << 4) /* flags2, bit 36 of both; Linux 6.6 */
#define FLAGS2_PASSTHROUGH (1u << 5)
#define FLAGS2_HAS_RESEND (1u << 7)
#define NOTIFY_RESEND 7
#define NOTIFY_INC_EPOCH 8           /* Linux 6.16: look every cached name up again */
/* Offsets in struct fuse_init_in and fuse_init_out, protocol 7.36 and later. */
enum { IN_FLAGS = 12, IN_FLAGS2 = 16, IN_LENGTH = 20 };
enum { OUT_FLAGS = 12, OUT_FLAGS2 = 32, OUT_STACK_DEPTH = 36, OUT_LENGTH = 40 };
/* us. A client that waits for answers asks again some 10 to 20 us after one: to sleep until then and be woken takes
 * the daemon longer, and an idle processor longer still (scripts/bench/ops.py: open and close took 105 to 130 us, and
 * 60 to 67 with this). Who does not ask soon is not waited for so the next time. */
enum { PATIENCE = 30, SOON = 60 };

#define TEXT 8192        /* bytes at the file's begin that are Python's: fuse/handover.py */

struct record { /* the session file behind its text; sparse, touched as far as used */
    uint32_t offered_flags;
    uint32_t offered_flags2;
    uint32_t engaged; /* passthrough was asked for in our reply */
    uint32_t init_length;
    char init[512]; /* the kernel's INIT, to be fed to the next daemon's libfuse */
    uint32_t slots_end, ids_end; /* nothing is used from here on */
    /* While BACKING_OPEN runs: an id that the kernel gave and nobody wrote down is last_id + 1,
     * since it counts upwards and this process asks from one thread only. */
    int32_t registering, last_id;
    int32_t ids[SLOTS]; /* backing ids that are open, 0 for none */
    struct slot slots[SLOTS];
};
#define FILE_SIZE (TEXT + sizeof(struct record))

static struct {
    int device;
    int want_passthrough;
    int want_fast_open;
    int taking_over;      /* the INIT for libfuse is the saved one, and its reply is swallowed */
    int resends_over;     /* a request was read that is no resent one */
    uint64_t init_unique; /* of the INIT not yet answered, else 0 */
    uint64_t request;     /* unique of the last request that was read */
    uint32_t requester;   /* the thread whose request that is */
    uint64_t inode;       /* and the inode that it is about */
    struct record *record;
} session = {.device = -1};

/* When there was no request to read, and whether the last one came soon after that. */
static struct {
    int64_t since; /* us; 0: there was one */
    int soon;
} gap;

static int64_t microseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000LL + now.tv_nsec / 1000;
}

/* OPEN and CREATE requests not yet answered. The kernel does not bound their number. */
static struct set opening;

static uint32_t get32(const char *at) {
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}
static void or32(char *at, uint32_t bits) {
    uint32_t value = get32(at) | bits;
    memcpy(at, &value, sizeof value);
}

/* The kernel asks each new file for security.capability before its first write, whatever the options.
 * kvfs has none (set_xattr refuses it), and saying so from here takes half the time: it is as long as
 * writing 1 MiB. */
int session_no_capability(int fd, const struct fuse_in_header *in, ssize_t length) {
    static const char name[] = "security.capability";
    const char *asked = (const char *)(in + 1) + sizeof(struct fuse_getxattr_in);
    if (in->opcode != FUSE_GETXATTR ||
        length < (ssize_t)(sizeof *in + sizeof(struct fuse_getxattr_in) + sizeof name) ||
        memcmp(asked, name, sizeof name) != 0)
        return 0;
    struct fuse_out_header out = {.len = sizeof out, .error = -ENODATA, .unique = in->unique};
    /* ENOENT: the request was interrupted, nobody waits for the answer. */
    return write(fd, &out, sizeof out) == sizeof out || errno == ENOENT;
}

void session_set_state(struct slot *slot, enum state state) {
    __atomic_store_n(&slot->state, (uint8_t)state, __ATOMIC_SEQ_CST);
}

/* What the kernel's INIT offers. */
static void offer(const char *request, ssize_t length) {
    const char *init = request + sizeof(struct fuse_in_header);
    session.init_unique = ((const struct fuse_in_header *)request)->unique;
    session.record->offered_flags = session.record->offered_flags2 = 0;
    if (length < (ssize_t)(sizeof(struct fuse_in_header) + IN_LENGTH)) return;
    session.record->offered_flags = get32(init + IN_FLAGS);
    if (session.record->offered_flags & INIT_FLAGS_EXT) session.record->offered_flags2 = get32(init + IN_FLAGS2);
}

/* Where requests land: in pages that are present. For one that the kernel would have to fault in, a
 * process that is being killed gets EINTR, and the client whose request it was gets EIO, since one
 * that was half copied is not sent again (fuse_dev_do_read of Linux). By reading the source; it was
 * not caught in the act. */
ssize_t session_land(int fd, struct landing *landing, size_t length) {
    if (length > landing->size) {
        if (landing->bytes) munmap(landing->bytes, landing->size);
        landing->size = 0;
        landing->bytes = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
        if (landing->bytes == MAP_FAILED) {
            landing->bytes = NULL;
            return -1;
        }
        (void)!mlock(landing->bytes, length); /* needs a limit that an ordinary user may not have */
        landing->size = length;
    }
    return read(fd, landing->bytes, length);
}

struct slot *session_slot(uint64_t handle) {
    uint32_t end = __atomic_load_n(&session.record->slots_end, __ATOMIC_RELAXED);
    while (handle >= end && !__atomic_compare_exchange_n(&session.record->slots_end, &end, handle + 1, 0, __ATOMIC_SEQ_CST,
                                                         __ATOMIC_SEQ_CST)) {
    }
    return &session.record->slots[handle];
}

/* From a device that does not wait: a request that _fast_open.c has not answered, if it is on. */
static ssize_t read_request(int fd, void *buffer, size_t length) {
    static struct landing landing;
    ssize_t got;
    if (fast_open_wakes() >= 0) return fast_open_receive(buffer, length);
    do got = session_land(fd, &landing, length);
    while (got >= (ssize_t)sizeof(struct fuse_in_header) && session_no_capability(fd, (const void *)landing.bytes, got));
    if (got > 0) memcpy(buffer, landing.bytes, got);
    return got;
}

/* Requests that come again come first, but for these: interrupts precede everything, and of every
 * 24 requests 16 may be forgets as long as there are any (fuse_dev_do_read of Linux). */
static int overtakes(uint32_t opcode) {
    return opcode == FUSE_FORGET || opcode == FUSE_BATCH_FORGET || opcode == FUSE_INTERRUPT;
}

static ssize_t receive(int fd, void *buffer, size_t length, void *userdata) {
    (void)userdata;
    ssize_t got;
    if (session.taking_over && !session.init_unique) {
        got = session.record->init_length;
        if ((size_t)got > length) {
            errno = EIO;
            return -1;
        }
        memcpy(buffer, session.record->init, got);
        offer(buffer, got);
        return got;
    }
    got = read_request(fd, buffer, length);
    /* The request was withdrawn between poll and read. pyfuse3 goes on after EINTR only. */
    if (got < 0 && errno == EAGAIN) errno = EINTR;
    struct fuse_in_header *in = buffer;
    if (got < (ssize_t)sizeof *in) return got;
    session.request = in->unique;
    session.requester = in->pid;
    session.inode = in->nodeid;
    if (gap.since) {
        gap.soon = (fast_open_wakes() >= 0 ? fast_open_came() / 1000 : microseconds()) - gap.since < SOON;
        gap.since = 0;
    }
    if (!(in->unique & UNIQUE_RESEND) && !overtakes(in->opcode)) session.resends_over = 1;
    if (in->opcode == FUSE_INIT) {
        if (got <= (ssize_t)sizeof session.record->init) {
            memcpy(session.record->init, buffer, got);
            session.record->init_length = got;
        }
        offer(buffer, got);
    } else if ((in->opcode == FUSE_OPEN || in->opcode == FUSE_CREATE) && set_add(&opening, in->unique, SIZE_MAX) < 0) {
        errno = ENOMEM;
        return -1;
    }
    return got;
}

static void answer_init(char *init) {
    struct record *record = session.record;
    or32(init + OUT_FLAGS, record->offered_flags & HANDLE_KILLPRIV_V2);
    if (!(record->offered_flags & INIT_FLAGS_EXT)) return;
    or32(init + OUT_FLAGS, INIT_FLAGS_EXT);
    or32(init + OUT_FLAGS2, record->offered_flags2 & (FLAGS2_HAS_RESEND | FLAGS2_DIRECT_IO_ALLOW_MMAP));
    if (session.want_passthrough && (record->offered_flags2 & FLAGS2_PASSTHROUGH)) {
        uint32_t depth = 1; /* backing files on ordinary file systems, not on stacked ones */
        or32(init + OUT_FLAGS2, FLAGS2_PASSTHROUGH);
        memcpy(init + OUT_STACK_DEPTH, &depth, sizeof depth);
        record->engaged = 1;
    }
}

/* Bytes for one READ, which fill() has copied from a file and reply() sends with what libfuse made of
 * an empty answer: they are in no object of Python. The answer comes before anything else is read. */
static struct {
    uint64_t unique; /* of the READ, 0 for none */
    size_t length, size;
    char *bytes;
} filled;

static ssize_t reply_filled(int fd, const struct fuse_out_header *empty) {
    struct fuse_out_header out = *empty;
    struct iovec both[] = {{&out, sizeof out}, {filled.bytes, filled.length}};
    out.len += filled.length;
    filled.unique = 0;
    ssize_t written = writev(fd, both, 2);
    return written == (ssize_t)out.len ? (ssize_t)empty->len : written;
}

static ssize_t reply(int fd, struct iovec *iov, int count, void *userdata) {
    (void)userdata;
    fd = session.device; /* libfuse's descriptor may be the one that wakes the loop */
    struct fuse_out_header *out = iov[0].iov_base;
    struct slot *answered = NULL;
    if (filled.unique && filled.unique == (out->unique & ~UNIQUE_RESEND) && out->len == sizeof *out && !out->error)
        return reply_filled(fd, out);
    if (out->unique && out->unique == session.init_unique) {
        session.init_unique = 0;
        if (session.taking_over) { /* the kernel has had this reply from the first daemon */
            ssize_t total = 0;
            session.taking_over = 0;
            for (int i = 0; i < count; i++) total += iov[i].iov_len;
            return total;
        }
        if (!out->error && count >= 2 && iov[1].iov_len >= OUT_LENGTH) answer_init(iov[1].iov_base);
    } else if (set_take(&opening, out->unique) && !out->error && count >= 2) {
        struct iovec *last = &iov[count - 1]; /* CREATE: the entry, then the same struct */
        struct fuse_open_out *open = (void *)((char *)last->iov_base + last->iov_len - sizeof *open);
        if (open->fh < SLOTS) {
            answered = &session.record->slots[open->fh];
            open->open_flags |= answered->open_flags;
            if (answered->open_flags & REPLY_DIRECT_IO) open->open_flags &= ~REPLY_KEEP_CACHE;
            if (answered->backing_id > 0) {
                open->open_flags &= ~(REPLY_DIRECT_IO | REPLY_KEEP_CACHE);
                open->open_flags |= REPLY_PASSTHROUGH;
                memcpy((char *)open + OPEN_BACKING_ID, &answered->backing_id, sizeof answered->backing_id);
            }
            session_set_state(answered, ANSWERING);
        }
    }
    ssize_t written = writev(fd, iov, count);
    if (answered) session_set_state(answered, OPEN);
    return written;
}

/* Names that are gone. The kernel takes the directory's lock for such a notification, and a process
 * that waits for this daemon's answer may hold it. If the daemon is killed then, the thread below
 * stays until the next daemon has answered, and with it all that the process has open, the tiers'
 * locks too: they would wait for each other. So the thread has descriptors of its own, this one. */
struct gone {
    struct gone *next;
    uint64_t parent;
    uint32_t length;
    char name[];
};
#define GONE_MAX 65536
static struct {
    pthread_mutex_t lock;
    pthread_cond_t more;
    struct gone *first, **last;
    unsigned waiting;
    int started;
} gone = {.lock = PTHREAD_MUTEX_INITIALIZER, .more = PTHREAD_COND_INITIALIZER};

static void *notify(void *argument) {
    int device = *(int *)argument;
    if (syscall(SYS_unshare, CLONE_FILES) == 0) {
        if (device > 0) syscall(SYS_close_range, 0, device - 1, 0);
        syscall(SYS_close_range, device + 1, ~0u, 0);
    }
    for (;;) {
        pthread_mutex_lock(&gone.lock);
        while (!gone.first) pthread_cond_wait(&gone.more, &gone.lock);
        struct gone *item = gone.first;
        gone.first = item->next;
        if (!gone.first) gone.last = &gone.first;
        gone.waiting--;
        pthread_mutex_unlock(&gone.lock);
        struct fuse_notify_inval_entry_out what = {.parent = item->parent, .namelen = item->length};
        struct fuse_out_header out = {.error = FUSE_NOTIFY_INVAL_ENTRY,
                                      .len = sizeof out + sizeof what + item->length + 1};
        struct iovec iov[] = {{&out, sizeof out}, {&what, sizeof what}, {item->name, item->length + 1}};
        /* ENOENT: the kernel had no such entry. ENODEV, ENOTCONN: the mount is gone. */
        ssize_t ignored = writev(device, iov, 3);
        (void)ignored;
        free(item);
    }
    return NULL;
}

static int start_notify(void) {
    static int device;
    sigset_t all, before;
    pthread_t thread;
    if (gone.started) return 0;
    device = session.device;
    gone.last = &gone.first;
    sigfillset(&all); /* signals are the main thread's */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&thread, NULL, notify, &device);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) return failed;
    pthread_detach(thread);
    gone.started = 1;
    return 0;
}

/* Found by the dynamic linker before libfuse's own; called by pyfuse3.init(). */
__attribute__((visibility("default"))) int fuse_session_mount(struct fuse_session *fuse, const char *mountpoint) {
    static const struct fuse_custom_io io = {.read = receive, .writev = reply};
    (void)mountpoint;
    if (session.device < 0) return -1;
    if (session.taking_over) {
        /* Only now, when somebody will read them. Requests that were in flight come again, first
         * of all; what the predecessor could not say of names that are gone, the epoch says. */
        struct fuse_out_header resend = {sizeof resend, NOTIFY_RESEND, 0};
        struct fuse_out_header epoch = {sizeof epoch, NOTIFY_INC_EPOCH, 0};
        ssize_t said = write(session.device, &epoch, sizeof epoch); /* EINVAL before Linux 6.16 */
        said = write(session.device, &resend, sizeof resend);
        (void)said; /* ENOTCONN: it was unmounted meanwhile, which the first read tells */
    }
    if (session.want_fast_open) fast_open_start(session.device);
    return fuse_session_custom_io(fuse, &io, fast_open_wakes() >= 0 ? fast_open_wakes() : session.device);
}

static PyObject *py_attach(PyObject *self, PyObject *args) {
    int device, want, file, takeover, fast = 0;
    struct stat found;
    (void)self;
    if (!PyArg_ParseTuple(args, "ipip|p", &device, &want, &file, &takeover, &fast)) return NULL;
    if (fstat(file, &found) < 0) return PyErr_SetFromErrno(PyExc_OSError);
    if (found.st_size != (off_t)FILE_SIZE)
        return PyErr_Format(PyExc_ValueError, "session file of %lld bytes, expected %zu", (long long)found.st_size,
                            FILE_SIZE);
    void *record = mmap(NULL, sizeof *session.record, PROT_READ | PROT_WRITE, MAP_SHARED, file, TEXT);
    if (record == MAP_FAILED) return PyErr_SetFromErrno(PyExc_OSError);
    if (session.record) munmap(session.record, sizeof *session.record);
    session.record = record;
    session.device = device;
    session.want_passthrough = want;
    session.want_fast_open = want && fast;
    session.taking_over = takeover && session.record->init_length;
    session.resends_over = !session.taking_over;
    session.init_unique = 0;
    if ((errno = start_notify())) return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

static PyObject *py_state(PyObject *self, PyObject *args) {
    (void)self;
    (void)args;
    struct record *record = session.record;
    int answered = record && record->init_length && (session.taking_over || !session.init_unique);
    return Py_BuildValue("(OOO)", answered ? Py_True : Py_False,
                         record && record->offered_flags2 & FLAGS2_PASSTHROUGH ? Py_True : Py_False,
                         record && record->engaged ? Py_True : Py_False);
}

static PyObject *py_request(PyObject *self, PyObject *args) {
    (void)self;
    (void)args;
    return Py_BuildValue("(KO)", (unsigned long long)(session.request & ~UNIQUE_RESEND),
                         session.request & UNIQUE_RESEND ? Py_True : Py_False);
}

static PyObject *py_requested_inode(PyObject *self, PyObject *args) {
    (void)self;
    (void)args;
    return PyLong_FromUnsignedLongLong(session.inode);
}

static PyObject *py_requester(PyObject *self, PyObject *args) {
    (void)self;
    (void)args;
    return PyLong_FromUnsignedLong(session.requester);
}

/* nowait: what is not in memory is not waited for. Then it is false, as it is for any error, which the
 * caller's own read will find. */
static PyObject *py_fill(PyObject *self, PyObject *args) {
    unsigned long long unique, offset, length;
    int fd, nowait;
    (void)self;
    if (!PyArg_ParseTuple(args, "KiKKp", &unique, &fd, &offset, &length, &nowait)) return NULL;
    filled.unique = filled.length = 0;
    if (length > filled.size) {
        char *grown = realloc(filled.bytes, length);
        if (!grown) return PyErr_NoMemory();
        filled.bytes = grown;
        filled.size = length;
    }
    while (filled.length < length) {
        struct iovec rest = {filled.bytes + filled.length, length - filled.length};
        ssize_t got = preadv2(fd, &rest, 1, offset + filled.length, nowait ? RWF_NOWAIT : 0);
        if (got < 0) Py_RETURN_FALSE;
        if (!got) break; /* the file ends */
        filled.length += got;
    }
    filled.unique = unique;
    Py_RETURN_TRUE;
}

static PyObject *py_resends_over(PyObject *self, PyObject *args) {
    (void)self;
    (void)args;
    struct pollfd device = {.fd = session.device, .events = POLLIN};
    if (session.resends_over) Py_RETURN_TRUE;
    if (fast_open_wakes() >= 0 ? fast_open_idle() : poll(&device, 1, 0) == 0) session.resends_over = 1; /* none is left */
    return PyBool_FromLong(session.resends_over);
}

/* Whether there is a request to read, or will be in a moment, if that is to be expected. */
static PyObject *py_readable(PyObject *self, PyObject *args) {
    (void)self;
    (void)args;
    struct pollfd device = {.fd = session.device, .events = POLLIN};
    int64_t begin = microseconds(), patience = gap.soon ? PATIENCE : 0;
    if (fast_open_wakes() >= 0) {
        if (fast_open_await(1000 * patience)) Py_RETURN_TRUE;
    } else {
        do {
            if (poll(&device, 1, 0)) Py_RETURN_TRUE; /* what is wrong the read will find */
        } while (microseconds() - begin < patience);
    }
    gap.since = begin;
    Py_RETURN_FALSE;
}

static int in_range(unsigned long long number, const char *what) {
    if (number < SLOTS && session.record) return 1;
    PyErr_Format(PyExc_ValueError, "%s %llu, expected less than %u and an attached session", what, number, SLOTS);
    return 0;
}

static PyObject *py_open_backing(PyObject *self, PyObject *args) {
    struct backing_map map = {0};
    unsigned long long entry;
    (void)self;
    if (!PyArg_ParseTuple(args, "iK", &map.fd, &entry) || !in_range(entry, "entry")) return NULL;
    struct record *record = session.record;
    if (entry >= record->ids_end) record->ids_end = entry + 1;
    __atomic_store_n(&record->registering, 1, __ATOMIC_SEQ_CST);
    int id = ioctl(session.device, BACKING_OPEN, &map);
    if (id > 0) {
        __atomic_store_n(&record->ids[entry], id, __ATOMIC_SEQ_CST);
        __atomic_store_n(&record->last_id, id, __ATOMIC_SEQ_CST);
    }
    __atomic_store_n(&record->registering, 0, __ATOMIC_SEQ_CST);
    if (id < 0) return PyErr_SetFromErrno(PyExc_OSError);
    return PyLong_FromLong(id);
}

static PyObject *py_close_backing(PyObject *self, PyObject *args) {
    unsigned int id;
    unsigned long long entry;
    (void)self;
    if (!PyArg_ParseTuple(args, "IK", &id, &entry) || !in_range(entry, "entry")) return NULL;
    uint32_t backing_id = id;
    int failed = ioctl(session.device, BACKING_CLOSE, &backing_id) < 0;
    session.record->ids[entry] = 0;
    if (failed) return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

static PyObject *py_backings(PyObject *self, PyObject *args) {
    (void)self;
    (void)args;
    struct record *record = session.record;
    PyObject *found = PyList_New(0);
    if (!found || !record) return found;
    for (uint32_t entry = 0; entry < record->ids_end; entry++) {
        if (!record->ids[entry]) continue;
        PyObject *item = Py_BuildValue("(Ii)", entry, record->ids[entry]);
        if (!item || PyList_Append(found, item) < 0) {
            Py_XDECREF(item);
            Py_DECREF(found);
            return NULL;
        }
        Py_DECREF(item);
    }
    if (record->registering) { /* the predecessor died in open_backing() */
        uint32_t id = record->last_id + 1;
        int known = 0;
        for (uint32_t entry = 0; entry < record->ids_end; entry++) known |= record->ids[entry] == (int32_t)id;
        if (!known) (void)!ioctl(session.device, BACKING_CLOSE, &id); /* ENOENT: it had not begun */
        record->registering = 0;
    }
    return found;
}

static PyObject *py_bind(PyObject *self, PyObject *args) {
    unsigned long long handle, inode, request;
    int id, noflush, direct, writable;
    unsigned char tier;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKKipppb", &handle, &inode, &request, &id, &noflush, &direct, &writable, &tier) ||
        !in_range(handle, "file handle"))
        return NULL;
    struct slot *slot = session_slot(handle);
    slot->inode = inode;
    slot->request = request;
    slot->backing_id = id;
    slot->open_flags = (noflush ? REPLY_NOFLUSH : 0) | (direct ? REPLY_DIRECT_IO : 0);
    slot->writable = writable;
    slot->tier = tier;
    session_set_state(slot, BOUND);
    Py_RETURN_NONE;
}

static PyObject *py_set_state(PyObject *self, PyObject *args) {
    unsigned long long handle;
    unsigned char state;
    (void)self;
    if (!PyArg_ParseTuple(args, "Kb", &handle, &state) || !in_range(handle, "file handle")) return NULL;
    session_set_state(&session.record->slots[handle], state);
    Py_RETURN_NONE;
}

static PyObject *py_slots(PyObject *self, PyObject *args) {
    (void)self;
    (void)args;
    PyObject *found = PyList_New(0);
    for (uint32_t handle = 0; found && session.record && handle < session.record->slots_end; handle++) {
        struct slot *slot = &session.record->slots[handle];
        if (slot->state == FREE) continue;
        PyObject *item = Py_BuildValue("(IKKiBOBO)", handle, (unsigned long long)slot->inode,
                                       (unsigned long long)slot->request, slot->backing_id, slot->state,
                                       slot->writable ? Py_True : Py_False, slot->tier,
                                       slot->open_flags & REPLY_DIRECT_IO ? Py_True : Py_False);
        if (!item || PyList_Append(found, item) < 0) Py_CLEAR(found);
        Py_XDECREF(item);
    }
    return found;
}

static PyObject *py_slots_end(PyObject *self, PyObject *args) {
    (void)self;
    (void)args;
    return PyLong_FromUnsignedLong(session.record ? session.record->slots_end : 0);
}

static PyObject *py_gone(PyObject *self, PyObject *args) {
    unsigned long long parent;
    const char *name;
    Py_ssize_t length;
    (void)self;
    if (!PyArg_ParseTuple(args, "Ky#", &parent, &name, &length)) return NULL;
    struct gone *item = malloc(sizeof *item + length + 1);
    if (!item) return PyErr_NoMemory();
    *item = (struct gone){.parent = parent, .length = length};
    memcpy(item->name, name, length);
    item->name[length] = 0;
    pthread_mutex_lock(&gone.lock);
    int room = gone.started && gone.waiting < GONE_MAX;
    if (room) {
        *gone.last = item;
        gone.last = &item->next;
        gone.waiting++;
        pthread_cond_signal(&gone.more);
    }
    pthread_mutex_unlock(&gone.lock);
    if (!room) free(item);
    return PyBool_FromLong(room);
}

static PyMethodDef methods[] = {
    {"attach", py_attach, METH_VARARGS, "attach(device, want_passthrough, session_file, takeover, want_fast_open)"},
    {"state", py_state, METH_NOARGS, "state() -> (INIT was answered, offered by the kernel, engaged)"},
    {"request", py_request, METH_NOARGS, "request() -> (number, resent) of the request just read"},
    {"requested_inode", py_requested_inode, METH_NOARGS, "requested_inode() -> inode that the request just read is about"},
    {"requester", py_requester, METH_NOARGS, "requester() -> thread whose request was just read"},
    {"fill", py_fill, METH_VARARGS, "fill(request, fd, offset, length, nowait) -> whether an empty answer will have the bytes"},
    {"resends_over", py_resends_over, METH_NOARGS, "resends_over() -> all resent requests were read"},
    {"readable", py_readable, METH_NOARGS, "readable() -> whether a request waits, or has come within 30 us"},
    {"open_backing", py_open_backing, METH_VARARGS, "open_backing(fd, entry) -> id > 0. OSError: EPERM, ELOOP"},
    {"close_backing", py_close_backing, METH_VARARGS, "close_backing(id, entry), once no handle uses it"},
    {"backings", py_backings, METH_NOARGS, "backings() -> [(entry, id)] of the session file"},
    {"bind", py_bind, METH_VARARGS, "bind(handle, inode, request, backing_id, noflush, direct, writable, tier)"},
    {"set_state", py_set_state, METH_VARARGS, "set_state(handle, state)"},
    {"slots", py_slots, METH_NOARGS, "slots() -> [(handle, inode, request, backing_id, state, writable, tier, direct)]"},
    {"slots_end", py_slots_end, METH_NOARGS, "slots_end() -> no slot from here on was ever bound"},
    {"gone", py_gone, METH_VARARGS, "gone(parent, name) -> whether the kernel will be told; never blocks"},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "kvfs.fuse._passthrough", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit__passthrough(void) {
    static const struct {
        const char *name;
        long value;
    } constants[] = {{"SLOTS", SLOTS}, {"TEXT", TEXT}, {"FILE_SIZE", FILE_SIZE}, {"FREE", FREE}, {"BOUND", BOUND},
                     {"ANSWERING", ANSWERING}, {"OPEN", OPEN}, {"RELEASING", RELEASING}};
    PyObject *module = PyModule_Create(&definition);
    if (module && PyModule_AddFunctions(module, fast_open_methods) < 0) Py_CLEAR(module);
    if (module && PyModule_AddFunctions(module, fast_lookup_methods) < 0) Py_CLEAR(module);
    for (size_t i = 0; module && i < sizeof constants / sizeof *constants; i++)
        if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value) < 0) Py_CLEAR(module);
    return module;
}
