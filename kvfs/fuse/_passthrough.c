/* Kernel passthrough for an unmodified pyfuse3 on a stock libfuse (>= 3.14).
 *
 * Imported with RTLD_GLOBAL before pyfuse3, this module's fuse_session_mount is the one that
 * pyfuse3 calls. It hands libfuse our read and writev through its public custom-io call; all that
 * they change is three replies of the kernel's public ABI (linux/fuse.h):
 *   INIT          asks for FUSE_PASSTHROUGH and FUSE_HANDLE_KILLPRIV_V2, where the kernel offered them
 *   OPEN, CREATE  carry the backing id and flags that bind() gave for the reply's file handle
 *
 * Everything here runs in the daemon's one loop thread, under the GIL, but for writev of
 * notifications, whose replies have unique 0 and are passed on untouched.
 * Not for mounting: the caller mounts with mount(2) and passes the open /dev/fuse.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define FUSE_USE_VERSION 314
#include <errno.h>
#include <fuse3/fuse_lowlevel.h>
#include <linux/fuse.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/uio.h>
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
#define FLAGS2_PASSTHROUGH (1u << 5) /* flags2, bit 37 of both */
#define REPLY_DIRECT_IO (1u << 0)    /* open_flags */
#define REPLY_KEEP_CACHE (1u << 1)
#define REPLY_NOFLUSH (1u << 5)
#define REPLY_PASSTHROUGH (1u << 7)
/* Offsets in struct fuse_init_in and fuse_init_out, protocol 7.36 and later. */
enum { IN_FLAGS = 12, IN_FLAGS2 = 16, IN_LENGTH = 20 };
enum { OUT_FLAGS = 12, OUT_FLAGS2 = 32, OUT_STACK_DEPTH = 36, OUT_LENGTH = 40 };
enum { OPEN_BACKING_ID = 12 }; /* in struct fuse_open_out, once 'padding' */

#define SLOTS (1u << 20) /* file handles; 8 MiB of address space, touched as far as used */
struct binding {
    int32_t backing_id; /* 0: the daemon serves this handle itself */
    uint32_t open_flags;
};

static struct {
    int device;
    int want_passthrough;
    int offered;             /* by the kernel's INIT */
    uint32_t offered_flags;
    int engaged;             /* asked for in our reply */
    uint64_t init_unique;    /* of the INIT not yet answered, else 0 */
    struct binding *binding; /* by file handle */
} session = {.device = -1};

/* The set of OPEN and CREATE requests not yet answered: open addressing, linear probing.
 * Its size follows the number in flight, which the kernel does not bound. */
static struct {
    uint64_t *unique;
    size_t size, used;
} opening;

static size_t home(uint64_t unique) { return (unique * 0x9E3779B97F4A7C15u) >> 20 & (opening.size - 1); }

static int opening_add(uint64_t unique) {
    if (2 * opening.used >= opening.size) {
        size_t old_size = opening.size;
        uint64_t *old = opening.unique;
        size_t size = old_size ? 2 * old_size : 1024;
        uint64_t *grown = calloc(size, sizeof *grown);
        if (!grown) return -1;
        opening.unique = grown;
        opening.size = size;
        opening.used = 0;
        for (size_t i = 0; i < old_size; i++)
            if (old[i]) opening_add(old[i]);
        free(old);
    }
    size_t i = home(unique);
    while (opening.unique[i] && opening.unique[i] != unique) i = (i + 1) & (opening.size - 1);
    if (!opening.unique[i]) opening.used++;
    opening.unique[i] = unique;
    return 0;
}

static int opening_take(uint64_t unique) {
    if (!opening.size || !unique) return 0;
    size_t mask = opening.size - 1, i = home(unique);
    while (opening.unique[i] != unique) {
        if (!opening.unique[i]) return 0;
        i = (i + 1) & mask;
    }
    /* Close the gap, so that probing needs no tombstones. */
    for (size_t j = (i + 1) & mask; opening.unique[j]; j = (j + 1) & mask) {
        if (((j - home(opening.unique[j])) & mask) >= ((j - i) & mask)) {
            opening.unique[i] = opening.unique[j];
            i = j;
        }
    }
    opening.unique[i] = 0;
    opening.used--;
    return 1;
}

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
static int no_capability(int fd, const struct fuse_in_header *in, ssize_t length) {
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

static ssize_t receive(int fd, void *buffer, size_t length, void *userdata) {
    (void)userdata;
    ssize_t got;
    do got = read(fd, buffer, length);
    while (got >= (ssize_t)sizeof(struct fuse_in_header) && no_capability(fd, buffer, got));
    /* The request was withdrawn between poll and read. pyfuse3 goes on after EINTR only. */
    if (got < 0 && errno == EAGAIN) errno = EINTR;
    struct fuse_in_header *in = buffer;
    if (got < (ssize_t)sizeof *in) return got;
    if (in->opcode == FUSE_INIT) {
        const char *init = (const char *)(in + 1);
        session.init_unique = in->unique;
        session.offered_flags = got >= (ssize_t)sizeof *in + IN_LENGTH ? get32(init + IN_FLAGS) : 0;
        session.offered = got >= (ssize_t)sizeof *in + IN_LENGTH && (get32(init + IN_FLAGS) & INIT_FLAGS_EXT) &&
                          (get32(init + IN_FLAGS2) & FLAGS2_PASSTHROUGH);
    } else if ((in->opcode == FUSE_OPEN || in->opcode == FUSE_CREATE) && opening_add(in->unique) < 0) {
        errno = ENOMEM;
        return -1;
    }
    return got;
}

static ssize_t reply(int fd, struct iovec *iov, int count, void *userdata) {
    (void)userdata;
    struct fuse_out_header *out = iov[0].iov_base;
    if (out->unique && out->unique == session.init_unique) {
        session.init_unique = 0;
        if (out->error || count < 2 || iov[1].iov_len < OUT_LENGTH) return writev(fd, iov, count);
        char *init = iov[1].iov_base;
        or32(init + OUT_FLAGS, session.offered_flags & HANDLE_KILLPRIV_V2);
        if (session.want_passthrough && session.offered) {
            uint32_t depth = 1; /* backing files on ordinary file systems, not on stacked ones */
            or32(init + OUT_FLAGS, INIT_FLAGS_EXT);
            or32(init + OUT_FLAGS2, FLAGS2_PASSTHROUGH);
            memcpy(init + OUT_STACK_DEPTH, &depth, sizeof depth);
            session.engaged = 1;
        }
    } else if (opening_take(out->unique) && !out->error && count >= 2) {
        struct iovec *last = &iov[count - 1]; /* CREATE: the entry, then the same struct */
        struct fuse_open_out *open = (void *)((char *)last->iov_base + last->iov_len - sizeof *open);
        if (open->fh < SLOTS) {
            struct binding *binding = &session.binding[open->fh];
            open->open_flags |= binding->open_flags;
            if (binding->backing_id > 0) {
                open->open_flags &= ~(REPLY_DIRECT_IO | REPLY_KEEP_CACHE);
                open->open_flags |= REPLY_PASSTHROUGH;
                memcpy((char *)open + OPEN_BACKING_ID, &binding->backing_id, sizeof binding->backing_id);
            }
        }
    }
    return writev(fd, iov, count);
}

/* Found by the dynamic linker before libfuse's own; called by pyfuse3.init(). */
__attribute__((visibility("default"))) int fuse_session_mount(struct fuse_session *fuse, const char *mountpoint) {
    static const struct fuse_custom_io io = {.read = receive, .writev = reply};
    (void)mountpoint;
    if (session.device < 0) return -1;
    return fuse_session_custom_io(fuse, &io, session.device);
}

static PyObject *py_attach(PyObject *self, PyObject *args) {
    int device, want;
    (void)self;
    if (!PyArg_ParseTuple(args, "ip", &device, &want)) return NULL;
    if (!session.binding && !(session.binding = calloc(SLOTS, sizeof *session.binding))) return PyErr_NoMemory();
    session.device = device;
    session.want_passthrough = want;
    session.engaged = session.offered = 0;
    Py_RETURN_NONE;
}

static PyObject *py_state(PyObject *self, PyObject *args) {
    (void)self;
    (void)args;
    return Py_BuildValue("(OO)", session.offered ? Py_True : Py_False, session.engaged ? Py_True : Py_False);
}

static PyObject *py_open_backing(PyObject *self, PyObject *args) {
    struct backing_map map = {0};
    (void)self;
    if (!PyArg_ParseTuple(args, "i", &map.fd)) return NULL;
    int id = ioctl(session.device, BACKING_OPEN, &map);
    if (id < 0) return PyErr_SetFromErrno(PyExc_OSError);
    return PyLong_FromLong(id);
}

static PyObject *py_close_backing(PyObject *self, PyObject *args) {
    unsigned int id;
    (void)self;
    if (!PyArg_ParseTuple(args, "I", &id)) return NULL;
    uint32_t backing_id = id;
    if (ioctl(session.device, BACKING_CLOSE, &backing_id) < 0) return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

static PyObject *py_bind(PyObject *self, PyObject *args) {
    unsigned long long handle;
    int id, noflush;
    (void)self;
    if (!PyArg_ParseTuple(args, "Kip", &handle, &id, &noflush)) return NULL;
    if (handle >= SLOTS || !session.binding) {
        PyErr_Format(PyExc_ValueError, "file handle %llu, expected less than %u and an attached session", handle, SLOTS);
        return NULL;
    }
    session.binding[handle] = (struct binding){.backing_id = id, .open_flags = noflush ? REPLY_NOFLUSH : 0};
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"attach", py_attach, METH_VARARGS, "attach(device, want_passthrough): serve this open, mounted /dev/fuse."},
    {"state", py_state, METH_NOARGS, "state() -> (offered by the kernel, engaged), known once INIT was answered."},
    {"open_backing", py_open_backing, METH_VARARGS, "open_backing(fd) -> id > 0. OSError: EPERM, ELOOP on stacked file systems."},
    {"close_backing", py_close_backing, METH_VARARGS, "close_backing(id), once no handle uses it and its reply was sent."},
    {"bind", py_bind, METH_VARARGS, "bind(handle, backing_id, noflush): what the OPEN or CREATE reply with this handle says."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "kvfs.fuse._passthrough", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit__passthrough(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module && PyModule_AddIntConstant(module, "SLOTS", SLOTS) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
