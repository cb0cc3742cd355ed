/* Lookups of names that a directory does not have, without Python.
 *
 * A directory is complete if all its names are here. A lookup of any other name in it is answered ENOENT.
 * Python tells of each name that comes or goes (`AbsentNames` in core/ledger/absent_names.py). A name too
 * many is harmless: Python answers its lookup. Names are here as hashes of 64 bits with a random key: the hash
 * of a name that is not here equals none of those of a million others, but for 1 case in 10^13. Then removing
 * one of two names would hide the other, which is a miss.
 *
 * `names.lock` is held for one look, or one change. The readers of requests and the loop's thread take it.
 */
#include "_session.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#define NAMES_MAX (1u << 20) /* 16 MiB */
#define DIRECTORIES_MAX (1u << 16)
#define FIRST_SIZE 1024
enum { NAME_MAX_BYTES = 255 };
enum { EVERYWHERE = 0 }; /* in place of a directory: the name may be in any */

/* A set of numbers: open addressing, linear probing, at most half full. 0 is no member. */
struct set {
    uint64_t *members;
    size_t size, used;
};

static struct {
    pthread_mutex_t lock;
    int on;
    struct set names, directories;
    uint64_t keys[2];
    uint64_t answered;
} names = {.lock = PTHREAD_MUTEX_INITIALIZER};

static size_t home(const struct set *set, uint64_t member) { return (member * 0x9E3779B97F4A7C15u) >> 20 & (set->size - 1); }

static int has(const struct set *set, uint64_t member) {
    size_t at = home(set, member);
    while (set->members[at] && set->members[at] != member) at = (at + 1) & (set->size - 1);
    return set->members[at] == member;
}

/* 0, or -1: it is full, or there is no memory. */
static int add(struct set *set, uint64_t member, size_t most) {
    if (has(set, member)) return 0;
    if (set->used == most) return -1;
    if (2 * (set->used + 1) > set->size) {
        struct set grown = {.size = 2 * set->size};
        if (!(grown.members = calloc(grown.size, sizeof *grown.members))) return -1;
        for (size_t i = 0; i < set->size; i++)
            if (set->members[i]) add(&grown, set->members[i], most);
        free(set->members);
        *set = grown;
    }
    size_t at = home(set, member);
    while (set->members[at]) at = (at + 1) & (set->size - 1);
    set->members[at] = member;
    set->used++;
    return 0;
}

static void take_out(struct set *set, uint64_t member) {
    if (!has(set, member)) return;
    size_t mask = set->size - 1, at = home(set, member);
    while (set->members[at] != member) at = (at + 1) & mask;
    /* Close the gap, so that probing needs no tombstones. */
    for (size_t next = (at + 1) & mask; set->members[next]; next = (next + 1) & mask) {
        if (((next - home(set, set->members[next])) & mask) >= ((next - at) & mask)) {
            set->members[at] = set->members[next];
            at = next;
        }
    }
    set->members[at] = 0;
    set->used--;
}

/* 0, or -1: there is no memory. */
static int prepare(struct set *set) {
    if (!set->members) set->members = calloc(FIRST_SIZE, sizeof *set->members);
    if (set->members && !set->size) set->size = FIRST_SIZE;
    return set->members ? 0 : -1;
}

static void empty(struct set *set) {
    memset(set->members, 0, set->size * sizeof *set->members);
    set->used = 0;
}

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

int fast_lookup_absent(const struct fuse_in_header *in, ssize_t length) {
    const char *name = (const char *)(in + 1);
    size_t size = length > (ssize_t)sizeof *in ? strnlen(name, length - sizeof *in) : 0;
    if (!size || size > NAME_MAX_BYTES) return 0;
    if (name[0] == '.' && (size == 1 || (size == 2 && name[1] == '.'))) return 0; /* of an NFS server */
    pthread_mutex_lock(&names.lock);
    int absent = names.on && has(&names.directories, in->nodeid) && !has(&names.names, hash_of(in->nodeid, name, size)) &&
                 !has(&names.names, hash_of(EVERYWHERE, name, size));
    names.answered += absent;
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
    if (prepare(&names.names) < 0 || prepare(&names.directories) < 0) {
        errno = ENOMEM;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
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
    int failed = complete ? add(&names.directories, directory, DIRECTORIES_MAX) < 0 : (take_out(&names.directories, directory), 0);
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
    int failed = given ? add(&names.names, hash, NAMES_MAX) < 0 : (take_out(&names.names, hash), 0);
    pthread_mutex_unlock(&names.lock);
    return PyBool_FromLong(!failed);
}

static PyObject *py_lookup_forget(PyObject *self, PyObject *args) {
    (void)self;
    (void)args;
    pthread_mutex_lock(&names.lock);
    empty(&names.directories);
    empty(&names.names);
    pthread_mutex_unlock(&names.lock);
    Py_RETURN_NONE;
}

static PyObject *py_lookup_state(PyObject *self, PyObject *args) {
    (void)self;
    (void)args;
    pthread_mutex_lock(&names.lock);
    size_t directories = names.directories.used, known = names.names.used;
    uint64_t answered = names.answered;
    pthread_mutex_unlock(&names.lock);
    return Py_BuildValue("(nnK)", (Py_ssize_t)directories, (Py_ssize_t)known, (unsigned long long)answered);
}

PyMethodDef fast_lookup_methods[] = {
    {"lookup_on", py_lookup_on, METH_VARARGS, "lookup_on(on): whether lookups are answered here. Call it first. OSError: the first time only"},
    {"lookup_complete", py_lookup_complete, METH_VARARGS,
     "lookup_complete(directory, complete) -> False: there is no room"},
    {"lookup_name", py_lookup_name, METH_VARARGS, "lookup_name(directory, name, given) -> False: there is no room. Directory 0: each"},
    {"lookup_forget", py_lookup_forget, METH_NOARGS, "lookup_forget(): no directory is complete"},
    {"lookup_state", py_lookup_state, METH_NOARGS, "lookup_state() -> (complete directories, names, lookups answered)"},
    {NULL, NULL, 0, NULL},
};
