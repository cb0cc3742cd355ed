/* Lookups of names that a directory does not have, without Python.
 *
 * A directory is complete if all its names are here. A lookup of any other name in it is answered ENOENT.
 * Python tells of each name that comes or goes (`AbsentNames` in core/ledger/absent_names.py). A name too
 * many is harmless: Python answers its lookup. Names are here as hashes of 64 bits with a random key: the hash
 * of a name that is not here equals none of those of a million others, but for 1 case in 10^13. Then removing
 * one of two names would hide the other, which is a miss.
 *
 * Each answer is noted with its name, because a miss of a block counts (core/ledger/misses.py). While there is no
 * room for a note, Python answers, and takes the notes.
 *
 * `names.lock` is held for one look, or one change. The readers of requests and the loop's thread take it.
 */
#include "_session.h"
#include "_set.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#define NAMES_MAX (1u << 20) /* 16 MiB */
#define DIRECTORIES_MAX (1u << 16)
enum { NAME_MAX_BYTES = 255 };
enum { EVERYWHERE = 0 }; /* in place of a directory: the name may be in any */
enum { NOTES_MAX = 1024 }; /* 280 KiB each of two */

struct note {
    uint64_t directory;
    int64_t at_ns; /* CLOCK_MONOTONIC */
    uint32_t thread; /* that asked */
    uint8_t length;
    char name[NAME_MAX_BYTES];
};

static struct {
    pthread_mutex_t lock;
    int on;
    struct set names, directories;
    uint64_t keys[2];
    struct note notes[2][NOTES_MAX]; /* readers fill one; the loop's thread empties the other without the lock */
    int filled, noted;
} names = {.lock = PTHREAD_MUTEX_INITIALIZER};

static uint64_t mix(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* Of wyhash's kind: https://github.com/wangyi-fudan/wyhash */
static uint64_t hash_of(uint64_t parent, const char *name, size_t length) {
    uint64_t hash = mix(names.keys[0] ^ parent, names.keys[1] ^ length);
    for (size_t at = 0; at < length; at += 8) {
        uint64_t word = 0;
        memcpy(&word, name + at, length - at < 8 ? length - at : 8);
        hash = mix(hash ^ word ^ 0xA0761D6478BD642Fu, names.keys[1] ^ 0xE7037ED1A0B428DBu);
    }
    return hash ? hash : 1;
}

/* Under the lock, with room. */
static void note(uint64_t directory, uint32_t thread, const char *name, size_t length) {
    struct note *note = &names.notes[names.filled][names.noted++];
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    note->directory = directory;
    note->thread = thread;
    note->at_ns = now.tv_sec * 1000000000ll + now.tv_nsec;
    note->length = (uint8_t)length;
    memcpy(note->name, name, length);
}

int fast_lookup_absent(const struct fuse_in_header *in, ssize_t length) {
    const char *name = (const char *)(in + 1);
    size_t size = length > (ssize_t)sizeof *in ? strnlen(name, length - sizeof *in) : 0;
    if (!size || size > NAME_MAX_BYTES) return 0;
    if (name[0] == '.' && (size == 1 || (size == 2 && name[1] == '.'))) return 0; /* of an NFS server */
    pthread_mutex_lock(&names.lock);
    int absent = names.on && set_has(&names.directories, in->nodeid) && !set_has(&names.names, hash_of(in->nodeid, name, size)) &&
                 !set_has(&names.names, hash_of(EVERYWHERE, name, size));
    absent = absent && names.noted < NOTES_MAX;
    if (absent) note(in->nodeid, in->pid, name, size);
    pthread_mutex_unlock(&names.lock);
    return absent;
}

/* Python's side: the loop's thread. */

static PyObject *py_lookup_on(PyObject *self, PyObject *args) {
    int on;
    (void)self;
    if (!PyArg_ParseTuple(args, "p", &on)) return NULL;
    if (!names.keys[1] && getrandom(names.keys, sizeof names.keys, 0) != sizeof names.keys) return PyErr_SetFromErrno(PyExc_OSError);
    names.keys[1] |= 1;
    pthread_mutex_lock(&names.lock);
    names.on = on;
    pthread_mutex_unlock(&names.lock);
    Py_RETURN_NONE;
}

static PyObject *py_lookup_complete(PyObject *self, PyObject *args) {
    unsigned long long directory;
    int complete;
    (void)self;
    if (!PyArg_ParseTuple(args, "Kp", &directory, &complete)) return NULL;
    pthread_mutex_lock(&names.lock);
    int failed = complete ? set_add(&names.directories, directory, DIRECTORIES_MAX) < 0 : (set_take(&names.directories, directory), 0);
    pthread_mutex_unlock(&names.lock);
    return PyBool_FromLong(!failed);
}

static PyObject *py_lookup_name(PyObject *self, PyObject *args) {
    unsigned long long directory;
    const char *name;
    Py_ssize_t length;
    int given;
    (void)self;
    if (!PyArg_ParseTuple(args, "Ky#p", &directory, &name, &length, &given)) return NULL;
    uint64_t hash = hash_of(directory, name, length);
    pthread_mutex_lock(&names.lock);
    int failed = given ? set_add(&names.names, hash, NAMES_MAX) < 0 : (set_take(&names.names, hash), 0);
    pthread_mutex_unlock(&names.lock);
    return PyBool_FromLong(!failed);
}

static PyObject *py_lookup_forget(PyObject *self, PyObject *args) {
    (void)self;
    (void)args;
    pthread_mutex_lock(&names.lock);
    set_empty(&names.directories);
    set_empty(&names.names);
    pthread_mutex_unlock(&names.lock);
    Py_RETURN_NONE;
}

static PyObject *py_lookup_state(PyObject *self, PyObject *args) {
    (void)self;
    (void)args;
    pthread_mutex_lock(&names.lock);
    size_t directories = names.directories.used, known = names.names.used;
    pthread_mutex_unlock(&names.lock);
    return Py_BuildValue("(nn)", (Py_ssize_t)directories, (Py_ssize_t)known);
}

static PyObject *py_lookup_take(PyObject *self, PyObject *args) {
    (void)self;
    (void)args;
    pthread_mutex_lock(&names.lock);
    const struct note *notes = names.notes[names.filled];
    int count = names.noted;
    names.filled ^= 1;
    names.noted = 0;
    pthread_mutex_unlock(&names.lock);
    PyObject *found = PyList_New(count);
    for (int i = 0; found && i < count; i++) {
        PyObject *one = Py_BuildValue("(Ky#LI)", (unsigned long long)notes[i].directory, notes[i].name, (Py_ssize_t)notes[i].length,
                                      (long long)notes[i].at_ns, notes[i].thread);
        if (!one) Py_CLEAR(found);
        else PyList_SET_ITEM(found, i, one);
    }
    return found;
}

PyMethodDef fast_lookup_methods[] = {
    {"lookup_on", py_lookup_on, METH_VARARGS, "lookup_on(on): whether lookups are answered here. Call it first. OSError: the first time only"},
    {"lookup_complete", py_lookup_complete, METH_VARARGS,
     "lookup_complete(directory, complete) -> False: there is no room"},
    {"lookup_name", py_lookup_name, METH_VARARGS, "lookup_name(directory, name, given) -> False: there is no room. Directory 0: each"},
    {"lookup_forget", py_lookup_forget, METH_NOARGS, "lookup_forget(): no directory is complete"},
    {"lookup_state", py_lookup_state, METH_NOARGS, "lookup_state() -> (complete directories, names)"},
    {"lookup_take", py_lookup_take, METH_NOARGS, "lookup_take() -> [(directory, name, ns of CLOCK_MONOTONIC, thread)]: what was answered since"},
    {NULL, NULL, 0, NULL},
};
