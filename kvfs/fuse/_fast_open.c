/* Opens of resident objects without Python (Linux 6.9 and later).
 *
 * OPEN for reading, GETATTR and RELEASE of the objects in a table are answered here, as are lookups of absent names
 * (`_fast_lookup.c`), and every other request goes to the loop by a queue. Two threads read /dev/fuse for that: the loop's, while it waits
 * for a request or has just done so, and one that never takes the GIL, while the loop sleeps longer than
 * a TICK or works longer than that. Only one of them waits for the device at a time. When both did, each
 * request woke both, and creates and renames took a fifth to a third longer.
 *
 * Python decides what is in the table (`FastOpens` in fast_open.py): sealed objects with one copy in
 * RAM that any open for reading would get at once. It takes an object out before it changes or moves
 * it; the handles that are open by then become Python's. An entry says how its backing file looked
 * when it was sealed, and each open compares: a file that looks otherwise is Python's to explain.
 *
 * Locks: `reading` is held from the read of a request until it is in the queue or answered, so
 * requests keep the kernel's order. `table.lock` is held from the look at an entry until the reply:
 * what Python takes out is open in the table or nowhere. `reading` comes first. Nobody waits for
 * Python or a disk with either; the loop only tries `reading`.
 */
#include "_session.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { ENTRIES = 65536, BUCKETS = 2 * ENTRIES, PATH = 48, NONE = 0 };
/* Each answer takes some us, and an engine waits for it. As SCHED_FIFO the thread waits for no processor beside movers
 * (2 to 3 ms in 200 opens and fstats, 107 to 117 with this). But on a busy machine (load 12) half of the rounds of a
 * tight loop then had 10,000 opens a second, the others 20,000 to 60,000. Perhaps the client waits for PATIENCE after
 * each answer if both have the same processor. */
enum { NICE = -20 };
/* ns. Each look of the thread while the loop works costs the requests of the loop 10 to 20 us: they run on the
 * thread's processor, or wake one. With a TICK of 50 us a create took 1.35 times as long. */
enum { TICK = 1000000 };
/* ns. The fstat that Python's open() adds comes within 10 us; to sleep until then and be woken takes longer. */
enum { PATIENCE = 30000 };
#define NEVER INT64_MAX
#define NS 1000000000LL

struct entry { /* numbers of entries are indexes; 0 is none */
    uint64_t inode;
    int64_t deadline; /* ns since 1970 from which Python must be asked */
    int64_t timeout;  /* ns that the kernel may keep the attributes */
    int64_t use_step; /* ns: how old a time of access may be before a read moves it */
    int64_t accessed; /* ns since 1970: the time of access, if reads have moved it; else 0 */
    int64_t mtime;    /* ns: of the backing file, as it was sealed */
    int64_t size;     /* bytes: of the backing file, as it was sealed */
    int32_t backing_id;
    uint32_t chain;        /* the next of its bucket, or of the free ones */
    uint32_t newer, older; /* by use; free of them while it is not in the table */
    uint32_t next_open, open_before; /* in the list of those with handles */
    uint32_t handles;      /* the first of its open handles */
    uint32_t open;         /* how many */
    /* Since Python asked the last time: */
    uint32_t uses, firsts; /* opens; those of them that found no handle open */
    uint32_t user;         /* the thread that opened it last */
    uint32_t next_used;    /* in the order of first use; its own number at the end */
    int64_t spent;         /* ns in these opens */
    uint8_t read;          /* whether it was ever opened here */
    uint8_t tier;
    char path[PATH]; /* of the backing file, below table.root */
    struct fuse_attr attr;
};

static struct {
    pthread_mutex_t lock;
    int on;            /* whether requests are answered from here */
    int root;          /* directory of the backing files */
    uint64_t answered; /* opens */
    uint32_t size, end, free, newest, oldest;
    uint32_t open; /* handles of all entries */
    uint32_t first_open; /* of the entries with handles */
    uint32_t used, last_used; /* the entries with uses, in their order */
    int noted;                /* eventfd: there are some, that were not there before */
    struct entry *entries;
    uint32_t *buckets;
    uint32_t *handles; /* numbers that Python gave for opens here: a stack */
    uint32_t spare, room;
} table = {.lock = PTHREAD_MUTEX_INITIALIZER, .root = -1, .noted = -1};

/* The handles that are open here, by number: their entry, and the others of that entry. */
static struct opened {
    uint32_t entry, next, before;
} *opened;

struct request {
    struct request *next;
    int64_t came; /* ns */
    ssize_t length;
    char bytes[];
};
static struct {
    pthread_mutex_t lock;
    struct request *first, **last;
    int wakes;    /* eventfd: readable while the queue has something, or the device has ended */
    int woken;    /* whether it is */
    int failed;   /* errno of the device's end */
    int64_t came; /* ns: when the last request that left the queue was read */
    size_t large; /* bytes of the largest request */
} queue = {.lock = PTHREAD_MUTEX_INITIALIZER, .wakes = -1};

/* What the loop does; changed with queue.lock. It sleeps in the first two: the thread waits for the device, or the
 * loop does. In the others it will look at the queue before it sleeps. */
enum state_of_loop { ASLEEP, DOZING, AWAITING, AT_WORK };
static struct {
    enum state_of_loop state;
    int watches;    /* the device wakes it: reader.wakes has it */
    uint64_t turns; /* how often it has waited */
} loop = {.state = DOZING};

static struct {
    pthread_t thread;
    int running, device;
    int failed; /* errno: why there is no table */
    int wakes;  /* epoll: readable when the loop has a request: of queue.wakes, and of the device if loop.watches */
    int stop;   /* eventfd */
} reader = {.device = -1, .wakes = -1, .stop = -1};
static pthread_mutex_t reading = PTHREAD_MUTEX_INITIALIZER;

static int64_t now_of(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec * NS + now.tv_nsec;
}

/* The table: with its lock. */

static uint32_t *bucket_of(uint64_t inode) { return &table.buckets[(inode * 0x9E3779B97F4A7C15u) >> 40 & (BUCKETS - 1)]; }

static uint32_t find(uint64_t inode) {
    if (!table.entries) return NONE;
    uint32_t at = *bucket_of(inode);
    while (at && table.entries[at].inode != inode) at = table.entries[at].chain;
    return at;
}

static void unlink_used_order(uint32_t at) {
    struct entry *entry = &table.entries[at];
    if (entry->newer) table.entries[entry->newer].older = entry->older;
    else table.newest = entry->older;
    if (entry->older) table.entries[entry->older].newer = entry->newer;
    else table.oldest = entry->newer;
    entry->newer = entry->older = NONE;
}

static void make_newest(uint32_t at) {
    struct entry *entry = &table.entries[at];
    entry->older = table.newest;
    entry->newer = NONE;
    if (table.newest) table.entries[table.newest].newer = at;
    table.newest = at;
    if (!table.oldest) table.oldest = at;
}

static void note_use(uint32_t at, uint32_t user, int64_t spent) {
    struct entry *entry = &table.entries[at];
    if (table.newest != at) {
        unlink_used_order(at);
        make_newest(at);
    }
    if (!entry->uses++) {
        entry->next_used = NONE;
        if (table.last_used) table.entries[table.last_used].next_used = at;
        else {
            table.used = at;
            (void)!eventfd_write(table.noted, 1);
        }
        table.last_used = at;
    }
    entry->firsts += entry->open == 0;
    entry->user = user;
    entry->spent += spent;
    entry->read = 1;
}

static void forget_uses(uint32_t at) {
    struct entry *entry = &table.entries[at];
    if (!entry->uses) return;
    uint32_t before = NONE;
    for (uint32_t one = table.used; one != at; one = table.entries[one].next_used) before = one;
    if (before) table.entries[before].next_used = entry->next_used;
    else table.used = entry->next_used;
    if (table.last_used == at) table.last_used = before;
    entry->uses = entry->firsts = 0;
    entry->spent = 0;
}

static void add_handle(uint32_t at, uint32_t handle) {
    struct entry *entry = &table.entries[at];
    opened[handle] = (struct opened){.entry = at, .next = entry->handles};
    if (entry->handles) opened[entry->handles].before = handle;
    entry->handles = handle;
    if (!entry->open++) {
        entry->next_open = table.first_open;
        entry->open_before = NONE;
        if (table.first_open) table.entries[table.first_open].open_before = at;
        table.first_open = at;
    }
    table.open++;
}

static void remove_handle(uint32_t handle) {
    struct opened *one = &opened[handle];
    struct entry *entry = &table.entries[one->entry];
    if (one->next) opened[one->next].before = one->before;
    if (one->before) opened[one->before].next = one->next;
    else entry->handles = one->next;
    one->entry = NONE;
    if (!--entry->open) {
        if (entry->next_open) table.entries[entry->next_open].open_before = entry->open_before;
        if (entry->open_before) table.entries[entry->open_before].next_open = entry->next_open;
        else table.first_open = entry->next_open;
    }
    table.open--;
}

static void send_error(uint64_t unique, int error) {
    struct fuse_out_header out = {.len = sizeof out, .unique = unique, .error = -error};
    (void)!write(reader.device, &out, sizeof out); /* ENOENT: the sender was interrupted */
}

/* Whether the kernel got it. If not, the sender was interrupted and nobody waits for the answer. */
static int send_reply(uint64_t unique, const void *body, size_t length) {
    struct fuse_out_header out = {.len = sizeof out + length, .unique = unique};
    struct iovec parts[] = {{&out, sizeof out}, {(void *)body, length}};
    return writev(reader.device, parts, length ? 2 : 1) == (ssize_t)out.len;
}

/* Whether the backing file looks as it was sealed. Root may have changed it behind kvfs. */
static int untouched(const struct entry *entry) {
    struct stat found;
    return fstatat(table.root, entry->path, &found, AT_SYMLINK_NOFOLLOW) == 0 && found.st_size == entry->size &&
           found.st_mtim.tv_sec * NS + found.st_mtim.tv_nsec == entry->mtime;
}

/* Moves the time of access as relatime does (`Namespaces.unused`). The kernel is not told: after a read or an mmap it
 * doubts the time by itself. If it were told, the fstat that Python's open() adds would come here as well. */
static void move_time_of_access(struct entry *entry) {
    struct fuse_attr *attr = &entry->attr;
    int64_t now = now_of(CLOCK_REALTIME), atime = attr->atime * NS + attr->atimensec;
    if (atime > (int64_t)attr->mtime * NS + attr->mtimensec && now - atime <= entry->use_step) return;
    attr->atime = now / NS;
    attr->atimensec = now % NS;
    entry->accessed = now;
}

static int answer_open(const struct fuse_in_header *in, const struct fuse_open_in *how) {
    if ((how->flags & O_ACCMODE) != O_RDONLY || how->flags & O_TRUNC) return 0;
    uint32_t at = find(in->nodeid);
    if (!at || !table.spare) return 0;
    struct entry *entry = &table.entries[at];
    int64_t began = now_of(CLOCK_MONOTONIC);
    if (entry->deadline != NEVER && now_of(CLOCK_REALTIME) >= entry->deadline) return 0;
    if (!untouched(entry)) return 0;
    move_time_of_access(entry);
    uint32_t handle = table.handles[--table.spare];
    struct slot *slot = session_slot(handle);
    slot->inode = in->nodeid;
    slot->request = in->unique;
    slot->backing_id = entry->backing_id;
    slot->open_flags = REPLY_NOFLUSH;
    slot->writable = 0;
    slot->tier = entry->tier;
    session_set_state(slot, BOUND);
    struct fuse_open_out out = {.fh = handle, .open_flags = REPLY_PASSTHROUGH | REPLY_NOFLUSH};
    memcpy((char *)&out + OPEN_BACKING_ID, &entry->backing_id, sizeof entry->backing_id);
    session_set_state(slot, ANSWERING);
    if (!send_reply(in->unique, &out, sizeof out)) {
        session_set_state(slot, FREE);
        table.handles[table.spare++] = handle;
        return 1;
    }
    session_set_state(slot, OPEN);
    note_use(at, in->pid, now_of(CLOCK_MONOTONIC) - began);
    add_handle(at, handle);
    table.answered++;
    return 1;
}

static int answer_getattr(const struct fuse_in_header *in) {
    uint32_t at = find(in->nodeid);
    if (!at) return 0;
    struct entry *entry = &table.entries[at];
    int64_t valid = entry->timeout;
    if (entry->deadline != NEVER) {
        int64_t left = entry->deadline - now_of(CLOCK_REALTIME);
        if (left <= 0) return 0;
        if (left < valid) valid = left;
    }
    struct fuse_attr_out out = {.attr_valid = valid / NS, .attr_valid_nsec = valid % NS, .attr = entry->attr};
    send_reply(in->unique, &out, sizeof out);
    return 1;
}

static int answer_release(const struct fuse_in_header *in, const struct fuse_release_in *what) {
    if (what->fh >= SLOTS || !opened || !opened[what->fh].entry) return 0;
    uint32_t handle = what->fh;
    struct slot *slot = session_slot(handle);
    session_set_state(slot, RELEASING);
    remove_handle(handle);
    send_reply(in->unique, NULL, 0);
    session_set_state(slot, FREE);
    if (table.spare < table.room) table.handles[table.spare++] = handle;
    return 1;
}

/* Whether the request was answered. Any thread that holds `reading`. */
static int answer(const struct fuse_in_header *in, ssize_t length) {
    int answered = 0;
    if (length < (ssize_t)sizeof *in) return 0;
    if (session_no_capability(reader.device, in, length)) return 1;
    if (in->opcode == FUSE_LOOKUP && !(in->unique & UNIQUE_RESEND) && __atomic_load_n(&table.on, __ATOMIC_RELAXED) &&
        fast_lookup_absent(in, length)) {
        send_error(in->unique, ENOENT);
        return 1;
    }
    if (in->unique & UNIQUE_RESEND || (in->opcode != FUSE_OPEN && in->opcode != FUSE_GETATTR && in->opcode != FUSE_RELEASE))
        return 0;
    pthread_mutex_lock(&table.lock);
    if (in->opcode == FUSE_RELEASE) answered = answer_release(in, (const void *)(in + 1));
    else if (table.on && in->opcode == FUSE_OPEN) answered = answer_open(in, (const void *)(in + 1));
    else if (table.on) answered = answer_getattr(in);
    pthread_mutex_unlock(&table.lock);
    return answered;
}

/* The queue. */

static void wake_loop(void) { /* with queue.lock */
    loop.state = AT_WORK;
    if (queue.woken) return;
    queue.woken = 1;
    (void)!eventfd_write(queue.wakes, 1);
}

static void push(const void *bytes, ssize_t length) {
    struct request *one = malloc(sizeof *one + length);
    if (!one) abort(); /* the request would be lost, and its sender would wait for ever */
    one->next = NULL;
    one->came = now_of(CLOCK_MONOTONIC);
    one->length = length;
    memcpy(one->bytes, bytes, length);
    pthread_mutex_lock(&queue.lock);
    *queue.last = one;
    queue.last = &one->next;
    if (loop.state == ASLEEP || loop.state == DOZING) wake_loop();
    pthread_mutex_unlock(&queue.lock);
}

static struct request *pop(void) {
    pthread_mutex_lock(&queue.lock);
    struct request *one = queue.first;
    if (one && !(queue.first = one->next)) queue.last = &queue.first;
    if (!queue.first && queue.woken && !queue.failed) {
        eventfd_t ignored;
        queue.woken = 0;
        (void)!eventfd_read(queue.wakes, &ignored);
    }
    pthread_mutex_unlock(&queue.lock);
    return one;
}

static int device_has_request(void) {
    struct pollfd device = {.fd = reader.device, .events = POLLIN};
    return poll(&device, 1, 0) > 0;
}

enum outcome { NOTHING, QUEUED, ANSWERED };

/* Reads one request from the device and answers it, or puts it in the queue. With `reading`. */
static enum outcome take_request(struct landing *landing) {
    ssize_t got = session_land(reader.device, landing, __atomic_load_n(&queue.large, __ATOMIC_RELAXED));
    if (got >= 0) {
        if (answer((const void *)landing->bytes, got)) return ANSWERED;
        push(landing->bytes, got);
        return QUEUED;
    }
    if (errno == EINTR || errno == ENOENT) return QUEUED; /* withdrawn */
    if (errno == EAGAIN) return NOTHING;
    pthread_mutex_lock(&queue.lock);
    queue.failed = errno;
    wake_loop();
    pthread_mutex_unlock(&queue.lock);
    return NOTHING;
}

/* The thread. */

/* 0, or -1. With queue.lock. */
static int watch_device(int watches) {
    struct epoll_event event = {.events = EPOLLIN};
    if (loop.watches == watches) return 0;
    if (epoll_ctl(reader.wakes, watches ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, reader.device, &event) < 0) return -1;
    loop.watches = watches;
    return 0;
}

/* After a TICK: whether the thread is to look at the device. `seen`: turns of the loop until the TICK before. */
static int look_after(uint64_t *seen) {
    pthread_mutex_lock(&queue.lock);
    /* A loaded machine may start the thread before libfuse has asked for its first request, and said how large it
     * may be. */
    int same = loop.turns == *seen && __atomic_load_n(&queue.large, __ATOMIC_RELAXED);
    *seen = loop.turns;
    if (same && loop.state == DOZING && watch_device(0) == 0) loop.state = ASLEEP;
    int look = loop.state == ASLEEP || (same && loop.state == AT_WORK);
    pthread_mutex_unlock(&queue.lock);
    return look;
}

/* Waits until the thread is to read. `since`: of its last answer. 0: it is to end. */
static int await_request(int64_t since, uint64_t *seen) {
    static const struct timespec tick = {.tv_nsec = TICK};
    struct pollfd stop_device[] = {{.fd = reader.stop, .events = POLLIN}, {.fd = reader.device, .events = POLLIN}};
    for (;;) {
        pthread_mutex_lock(&queue.lock);
        int asleep = loop.state == ASLEEP;
        pthread_mutex_unlock(&queue.lock);
        if (asleep && now_of(CLOCK_MONOTONIC) - since < PATIENCE) {
            if (device_has_request()) return 1;
            continue;
        }
        ppoll(stop_device, asleep ? 2 : 1, asleep ? NULL : &tick, NULL);
        if (stop_device[0].revents) return 0;
        if (asleep || look_after(seen)) return 1;
    }
}

static void *serve(void *unused) {
    static struct landing landing;
    int64_t since = 0;
    uint64_t seen = 0;
    (void)unused;
    (void)!setpriority(PRIO_PROCESS, gettid(), NICE); /* an ordinary user may not */
    while (!queue.failed && await_request(since, &seen)) {
        enum outcome outcome;
        do {
            pthread_mutex_lock(&reading);
            outcome = take_request(&landing);
            pthread_mutex_unlock(&reading);
            if (outcome == ANSWERED) since = now_of(CLOCK_MONOTONIC);
        } while (outcome);
    }
    return NULL;
}

static int start_thread(void) {
    sigset_t all, before;
    sigfillset(&all); /* signals are the main thread's */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&reader.thread, NULL, serve, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    reader.running = !failed;
    return failed;
}

int fast_open_wakes(void) { return reader.wakes; }

void fast_open_start(int device) {
    struct epoll_event event = {.events = EPOLLIN};
    if (reader.wakes >= 0) return;
    reader.device = device;
    queue.last = &queue.first;
    table.entries = calloc(ENTRIES + 1, sizeof *table.entries); /* touched as far as used */
    table.buckets = calloc(BUCKETS, sizeof *table.buckets);
    opened = calloc(SLOTS, sizeof *opened);
    reader.stop = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    queue.wakes = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    table.noted = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    reader.wakes = epoll_create1(EPOLL_CLOEXEC);
    if (table.entries && table.buckets && opened && reader.stop >= 0 && queue.wakes >= 0 && table.noted >= 0 && reader.wakes >= 0 &&
        epoll_ctl(reader.wakes, EPOLL_CTL_ADD, queue.wakes, &event) == 0 && watch_device(1) == 0)
        return;
    reader.failed = errno ? errno : ENOMEM;
    if (reader.wakes >= 0) close(reader.wakes);
    reader.wakes = -1;
}

/* Reads a request, unless the thread is about to. */
static enum outcome take_for_loop(void) {
    static struct landing landing;
    if (pthread_mutex_trylock(&reading)) return NOTHING;
    enum outcome outcome = take_request(&landing);
    pthread_mutex_unlock(&reading);
    return outcome;
}

static int has_request(void) { return __atomic_load_n(&queue.first, __ATOMIC_ACQUIRE) || queue.failed; }

/* Not DOZING if there is a request. */
static enum state_of_loop set_state_of_loop(enum state_of_loop state) {
    pthread_mutex_lock(&queue.lock);
    loop.turns += state == AWAITING;
    if (state == DOZING && has_request()) state = AT_WORK;
    if (state == DOZING && watch_device(1) < 0) state = ASLEEP; /* ENOMEM */
    loop.state = state;
    pthread_mutex_unlock(&queue.lock);
    return state;
}

ssize_t fast_open_receive(void *buffer, size_t length) {
    if (length > __atomic_load_n(&queue.large, __ATOMIC_RELAXED)) __atomic_store_n(&queue.large, length, __ATOMIC_RELAXED);
    set_state_of_loop(AT_WORK);
    struct request *one = pop();
    if (!one && take_for_loop() == QUEUED) one = pop();
    if (!one) {
        errno = queue.failed ? queue.failed : EINTR;
        return -1;
    }
    ssize_t got = one->length;
    queue.came = one->came;
    if ((size_t)got <= length) memcpy(buffer, one->bytes, got);
    free(one);
    if ((size_t)got <= length) return got;
    errno = EIO;
    return -1;
}

int64_t fast_open_came(void) { return queue.came; }

int fast_open_await(int64_t patience) {
    if (!queue.large) return 1; /* the first fast_open_receive says how large requests may be */
    int64_t begin = now_of(CLOCK_MONOTONIC);
    set_state_of_loop(AWAITING);
    while (!has_request() && (take_for_loop() == ANSWERED || now_of(CLOCK_MONOTONIC) - begin < patience)) {
    }
    return set_state_of_loop(DOZING) == AT_WORK;
}

int fast_open_idle(void) {
    if (pthread_mutex_trylock(&reading)) return 0;
    int idle = !queue.first && !device_has_request();
    pthread_mutex_unlock(&reading);
    return idle;
}

/* Python's side: the loop's thread. */

static PyObject *py_fast_on(PyObject *self, PyObject *args) {
    int on, root;
    (void)self;
    if (!PyArg_ParseTuple(args, "pi", &on, &root)) return NULL;
    if (on && (errno = reader.wakes < 0 ? reader.failed : reader.running ? 0 : start_thread()))
        return PyErr_SetFromErrno(PyExc_OSError);
    pthread_mutex_lock(&table.lock);
    __atomic_store_n(&table.on, on, __ATOMIC_RELAXED);
    table.root = root;
    pthread_mutex_unlock(&table.lock);
    Py_RETURN_NONE;
}

static PyObject *py_fast_grant(PyObject *self, PyObject *args) {
    unsigned int handle;
    (void)self;
    if (!PyArg_ParseTuple(args, "I", &handle)) return NULL;
    if (!handle || handle >= SLOTS) return PyErr_Format(PyExc_ValueError, "handle %u, expected 1 to %u", handle, SLOTS - 1);
    pthread_mutex_lock(&table.lock);
    if (table.spare == table.room) {
        uint32_t room = table.room ? 2 * table.room : 256;
        uint32_t *grown = realloc(table.handles, room * sizeof *grown);
        if (!grown) {
            pthread_mutex_unlock(&table.lock);
            return PyErr_NoMemory();
        }
        table.handles = grown;
        table.room = room;
    }
    table.handles[table.spare++] = handle;
    pthread_mutex_unlock(&table.lock);
    Py_RETURN_NONE;
}

/* What an entry was when it was taken out. Python's objects are made without the lock: an allocation
 * may begin a collection, and the thread would wait for that. */
struct taken {
    int32_t backing_id;
    uint32_t uses, firsts, user, open;
    int64_t spent, accessed;
    int read;
    uint32_t *handles;
};

static int take(uint32_t at, struct taken *taken) { /* with table.lock */
    struct entry *entry = &table.entries[at];
    taken->handles = malloc((entry->open + 1) * sizeof *taken->handles);
    if (!taken->handles) return -1;
    taken->backing_id = entry->backing_id;
    taken->uses = entry->uses;
    taken->firsts = entry->firsts;
    taken->user = entry->user;
    taken->spent = entry->spent;
    taken->accessed = entry->accessed;
    taken->read = entry->read;
    for (taken->open = 0; entry->handles; remove_handle(entry->handles)) taken->handles[taken->open++] = entry->handles;
    forget_uses(at);
    unlink_used_order(at);
    uint32_t *link = bucket_of(entry->inode);
    while (*link != at) link = &table.entries[*link].chain;
    *link = entry->chain;
    entry->chain = table.free;
    table.free = at;
    table.size--;
    return 0;
}

/* (backing id, handles, opens, those that found none open, thread, ns, time of access, whether it was ever opened) */
static PyObject *build_taken(const struct taken *taken) {
    PyObject *handles = PyList_New(taken->open);
    for (uint32_t i = 0; handles && i < taken->open; i++) {
        PyObject *number = PyLong_FromUnsignedLong(taken->handles[i]);
        if (number) PyList_SET_ITEM(handles, i, number);
        else Py_CLEAR(handles);
    }
    if (!handles) return NULL;
    return Py_BuildValue("(iNIIILLO)", taken->backing_id, handles, taken->uses, taken->firsts, taken->user,
                         (long long)taken->spent, (long long)taken->accessed, taken->read ? Py_True : Py_False);
}

static PyObject *py_fast_take(PyObject *self, PyObject *args) {
    unsigned long long inode;
    (void)self;
    int even_open;
    struct taken taken;
    if (!PyArg_ParseTuple(args, "Kp", &inode, &even_open)) return NULL;
    if (!table.size) Py_RETURN_FALSE; /* only this thread makes it larger */
    pthread_mutex_lock(&table.lock);
    uint32_t at = find(inode);
    int stays = at && table.entries[at].open && !even_open;
    int failed = at && !stays && take(at, &taken) < 0;
    pthread_mutex_unlock(&table.lock);
    if (!at) Py_RETURN_FALSE;
    if (stays) Py_RETURN_TRUE;
    if (failed) return PyErr_NoMemory();
    PyObject *found = build_taken(&taken);
    free(taken.handles);
    return found;
}

static PyObject *py_fast_has(PyObject *self, PyObject *args) {
    unsigned long long inode;
    (void)self;
    if (!PyArg_ParseTuple(args, "K", &inode)) return NULL;
    pthread_mutex_lock(&table.lock);
    uint32_t at = find(inode);
    pthread_mutex_unlock(&table.lock);
    return PyBool_FromLong(at);
}

static PyObject *list_of(const uint64_t *inodes, uint32_t count) {
    PyObject *list = PyList_New(count);
    for (uint32_t i = 0; list && i < count; i++) {
        PyObject *one = PyLong_FromUnsignedLongLong(inodes[i]);
        if (one) PyList_SET_ITEM(list, i, one);
        else Py_CLEAR(list);
    }
    return list;
}

static PyObject *py_fast_inodes(PyObject *self, PyObject *args) {
    uint64_t inodes[256];
    unsigned int limit, found = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "I", &limit)) return NULL;
    pthread_mutex_lock(&table.lock);
    for (uint32_t at = table.oldest; at && found < limit && found < 256; at = table.entries[at].newer)
        inodes[found++] = table.entries[at].inode;
    pthread_mutex_unlock(&table.lock);
    return list_of(inodes, found);
}

static PyObject *py_fast_open_inodes(PyObject *self, PyObject *args) {
    uint32_t found = 0;
    (void)self;
    (void)args;
    pthread_mutex_lock(&table.lock);
    uint64_t *inodes = malloc((table.open + 1) * sizeof *inodes);
    for (uint32_t at = table.first_open; inodes && at; at = table.entries[at].next_open)
        inodes[found++] = table.entries[at].inode;
    pthread_mutex_unlock(&table.lock);
    if (!inodes) return PyErr_NoMemory();
    PyObject *list = list_of(inodes, found);
    free(inodes);
    return list;
}

static int parse_attr(const Py_buffer *bytes, struct fuse_attr *attr) {
    if (bytes->len != sizeof *attr) {
        PyErr_Format(PyExc_ValueError, "attributes of %zd bytes, expected %zu", bytes->len, sizeof *attr);
        return 0;
    }
    memcpy(attr, bytes->buf, sizeof *attr);
    return 1;
}

static PyObject *py_fast_offer(PyObject *self, PyObject *args) {
    unsigned long long inode;
    int id;
    unsigned char tier;
    long long deadline, timeout, use_step, size, mtime;
    const char *path;
    Py_buffer bytes;
    struct fuse_attr attr;
    (void)self;
    if (!PyArg_ParseTuple(args, "KibLLLLLsy*", &inode, &id, &tier, &deadline, &timeout, &use_step, &size, &mtime, &path, &bytes)) return NULL;
    int fits = parse_attr(&bytes, &attr);
    PyBuffer_Release(&bytes);
    if (!fits) return NULL;
    pthread_mutex_lock(&table.lock);
    uint32_t at = NONE;
    if (table.on && strlen(path) < PATH && !find(inode)) {
        if ((at = table.free)) table.free = table.entries[at].chain;
        else if (table.end < ENTRIES) at = ++table.end;
    }
    if (at) {
        struct entry *entry = &table.entries[at];
        uint32_t *bucket = bucket_of(inode);
        *entry = (struct entry){.inode = inode, .deadline = deadline, .timeout = timeout, .use_step = use_step, .mtime = mtime, .size = size, .backing_id = id,
                                .tier = tier, .chain = *bucket, .attr = attr};
        strcpy(entry->path, path);
        *bucket = at;
        make_newest(at);
        table.size++;
    }
    pthread_mutex_unlock(&table.lock);
    return PyBool_FromLong(at);
}

/* The inode that was used longest ago, of those without a handle; 0 if the table is not full. */
static PyObject *py_fast_surplus(PyObject *self, PyObject *args) {
    (void)self;
    (void)args;
    uint64_t inode = 0;
    pthread_mutex_lock(&table.lock);
    if (table.size == ENTRIES) {
        uint32_t at = table.oldest;
        while (at && table.entries[at].open) at = table.entries[at].newer;
        if (at) inode = table.entries[at].inode;
    }
    pthread_mutex_unlock(&table.lock);
    return PyLong_FromUnsignedLongLong(inode);
}

struct use {
    uint64_t inode;
    uint32_t uses, firsts, user;
    int64_t spent, accessed;
};

static PyObject *py_fast_uses(PyObject *self, PyObject *args) {
    uint32_t count = 0, taken = 0;
    (void)self;
    (void)args;
    pthread_mutex_lock(&table.lock);
    for (uint32_t at = table.used; at; at = table.entries[at].next_used) count++;
    struct use *uses = malloc((count + 1) * sizeof *uses);
    for (; uses && table.used; table.used = table.entries[table.used].next_used) {
        struct entry *entry = &table.entries[table.used];
        uses[taken++] = (struct use){entry->inode, entry->uses, entry->firsts, entry->user, entry->spent, entry->accessed};
        entry->uses = entry->firsts = 0;
        entry->spent = entry->accessed = 0;
    }
    if (uses) table.last_used = NONE;
    pthread_mutex_unlock(&table.lock);
    if (!uses) return PyErr_NoMemory();
    PyObject *list = PyList_New(taken);
    for (uint32_t i = 0; list && i < taken; i++) {
        PyObject *one = Py_BuildValue("(KIIILL)", (unsigned long long)uses[i].inode, uses[i].uses, uses[i].firsts,
                                      uses[i].user, (long long)uses[i].spent, (long long)uses[i].accessed);
        if (one) PyList_SET_ITEM(list, i, one);
        else Py_CLEAR(list);
    }
    free(uses);
    return list;
}

static PyObject *py_fast_inode(PyObject *self, PyObject *args) {
    unsigned long long handle, inode = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "K", &handle)) return NULL;
    pthread_mutex_lock(&table.lock);
    if (opened && handle < SLOTS && opened[handle].entry) inode = table.entries[opened[handle].entry].inode;
    pthread_mutex_unlock(&table.lock);
    return PyLong_FromUnsignedLongLong(inode);
}

static PyObject *py_fast_used(PyObject *self, PyObject *args) {
    (void)self;
    (void)args;
    return PyLong_FromLong(table.noted);
}

static PyObject *py_fast_state(PyObject *self, PyObject *args) {
    (void)self;
    (void)args;
    pthread_mutex_lock(&table.lock);
    int on = table.on;
    uint32_t size = table.size, open = table.open, spare = table.spare;
    uint64_t answered = table.answered;
    pthread_mutex_unlock(&table.lock);
    return Py_BuildValue("(OIIKI)", on ? Py_True : Py_False, size, open, (unsigned long long)answered, spare);
}

/* The kernel sends a FORGET once, so the next daemon would not hear of those in the queue. All other
 * requests of the queue come to it again. */
static int append_forgotten(PyObject *list, const struct request *one) {
    const struct fuse_in_header *in = (const void *)one->bytes;
    const struct fuse_forget_one *each = NULL;
    uint32_t count = 0;
    struct fuse_forget_one alone = {.nodeid = in->nodeid};
    if (in->opcode == FUSE_FORGET) each = &alone, count = 1;
    else if (in->opcode == FUSE_BATCH_FORGET) {
        const struct fuse_batch_forget_in *batch = (const void *)(in + 1);
        each = (const void *)(batch + 1);
        count = batch->count;
    }
    for (uint32_t i = 0; i < count; i++) {
        PyObject *inode = PyLong_FromUnsignedLongLong(each[i].nodeid);
        if (!inode || PyList_Append(list, inode) < 0) {
            Py_XDECREF(inode);
            return -1;
        }
        Py_DECREF(inode);
    }
    return 0;
}

static PyObject *py_fast_stop(PyObject *self, PyObject *args) {
    (void)self;
    (void)args;
    PyObject *forgotten = PyList_New(0);
    if (!forgotten || !reader.running) return forgotten;
    (void)!eventfd_write(reader.stop, 1);
    Py_BEGIN_ALLOW_THREADS
    pthread_join(reader.thread, NULL);
    Py_END_ALLOW_THREADS
    reader.running = 0;
    queue.failed = ENODEV;
    for (struct request *one = queue.first; one && forgotten; one = one->next)
        if (append_forgotten(forgotten, one) < 0) Py_CLEAR(forgotten);
    return forgotten;
}

PyMethodDef fast_open_methods[] = {
    {"fast_on", py_fast_on, METH_VARARGS, "fast_on(on, root): whether opens are answered from the table. OSError: there is none"},
    {"fast_grant", py_fast_grant, METH_VARARGS, "fast_grant(handle): a number for an open from the table"},
    {"fast_take", py_fast_take, METH_VARARGS,
     "fast_take(inode, even_open) -> False: not in the table; True: it is open, and stays; else (backing id, handles, "
     "opens, first opens, thread, ns, time of access, whether it was ever opened)"},
    {"fast_has", py_fast_has, METH_VARARGS, "fast_has(inode) -> whether it is in the table"},
    {"fast_inodes", py_fast_inodes, METH_VARARGS, "fast_inodes(limit) -> the inodes of the table that were used longest ago"},
    {"fast_open_inodes", py_fast_open_inodes, METH_NOARGS, "fast_open_inodes() -> the inodes of the table that have handles"},
    {"fast_offer", py_fast_offer, METH_VARARGS,
     "fast_offer(inode, backing id, tier, deadline, timeout, use step, size, mtime, path, attributes) -> whether it is in the table now"},
    {"fast_surplus", py_fast_surplus, METH_NOARGS, "fast_surplus() -> the inode to take out of a full table, or 0"},
    {"fast_uses", py_fast_uses, METH_NOARGS, "fast_uses() -> [(inode, opens, first opens, thread, ns, time of access or 0)] since the last call"},
    {"fast_inode", py_fast_inode, METH_VARARGS, "fast_inode(handle) -> the inode that was opened from the table, or 0"},
    {"fast_used", py_fast_used, METH_NOARGS, "fast_used() -> an eventfd: an object was opened that fast_uses did not have"},
    {"fast_state", py_fast_state, METH_NOARGS, "fast_state() -> (on, inodes, open handles, opens answered, handles to give)"},
    {"fast_stop", py_fast_stop, METH_NOARGS, "fast_stop() -> inodes that the kernel forgot; reads and answers no more"},
    {NULL, NULL, 0, NULL},
};
