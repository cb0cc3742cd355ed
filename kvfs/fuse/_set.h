/* A set of numbers other than 0: open addressing, linear probing, at most half full. No locks. */
#ifndef KVFS_SET_H
#define KVFS_SET_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SET_FIRST_SIZE = 1024 };

struct set {
    uint64_t *members;
    size_t size, used;
};

static inline size_t set_home(const struct set *set, uint64_t member) {
    return (member * 0x9E3779B97F4A7C15u) >> 20 & (set->size - 1);
}

/* Where the member is, or would be. */
static inline size_t set_find(const struct set *set, uint64_t member) {
    size_t at = set_home(set, member);
    while (set->members[at] && set->members[at] != member) at = (at + 1) & (set->size - 1);
    return at;
}

static inline int set_has(const struct set *set, uint64_t member) {
    return member && set->used && set->members[set_find(set, member)] == member;
}

/* 0, or -1: it is full, or there is no memory. */
static inline int set_add(struct set *set, uint64_t member, size_t most) {
    if (set_has(set, member)) return 0;
    if (set->used >= most) return -1;
    if (2 * (set->used + 1) > set->size) {
        struct set grown = {.size = set->size ? 2 * set->size : SET_FIRST_SIZE};
        if (!(grown.members = calloc(grown.size, sizeof *grown.members))) return -1;
        for (size_t i = 0; i < set->size; i++)
            if (set->members[i]) grown.members[set_find(&grown, set->members[i])] = set->members[i];
        free(set->members);
        set->members = grown.members;
        set->size = grown.size;
    }
    set->members[set_find(set, member)] = member;
    set->used++;
    return 0;
}

/* Whether it was there. */
static inline int set_take(struct set *set, uint64_t member) {
    if (!set_has(set, member)) return 0;
    size_t mask = set->size - 1, at = set_find(set, member);
    /* Close the gap, so that probing needs no tombstones. */
    for (size_t next = (at + 1) & mask; set->members[next]; next = (next + 1) & mask) {
        if (((next - set_home(set, set->members[next])) & mask) >= ((next - at) & mask)) {
            set->members[at] = set->members[next];
            at = next;
        }
    }
    set->members[at] = 0;
    set->used--;
    return 1;
}

/* It keeps its memory. */
static inline void set_empty(struct set *set) {
    if (set->size) memset(set->members, 0, set->size * sizeof *set->members);
    set->used = 0;
}

#endif
