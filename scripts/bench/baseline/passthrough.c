/* Comparison floor: kernel passthrough under an unmodified pyfuse3, and nothing else.
 *
 * Loaded with ctypes.CDLL(path, mode=RTLD_GLOBAL) BEFORE pyfuse3 is imported: the dynamic linker
 * then binds pyfuse3's fuse_session_mount to the one below, which mounts with mount(2) and hands
 * libfuse our read and writev through its public custom-io call (libfuse >= 3.14). Three replies
 * of the kernel's public ABI are patched: INIT (ask for PASSTHROUGH), OPEN and CREATE (backing_id).
 */
#define FUSE_USE_VERSION 314
#define _GNU_SOURCE
#include <errno.h>
#include <fuse3/fuse_lowlevel.h>
#include <linux/fuse.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/uio.h>
#include <unistd.h>

/* Newer than some distributions' linux/fuse.h; values from the kernel's uapi header. */
struct backing_map { int32_t fd; uint32_t flags; uint64_t padding; };
#define BACKING_OPEN       _IOW(229, 1, struct backing_map)
#define INIT_EXT           (1u << 30) /* flags */
#define FLAGS2_PASSTHROUGH (1u << 5)  /* flags2: bit 37 */
#define OPEN_PASSTHROUGH   (1u << 7)
#define OPEN_NOFLUSH       (1u << 5)

#define SLOTS 4096 /* more than the kernel keeps outstanding */
static int device = -1;
static uint64_t init_unique;
static uint64_t opening[SLOTS];
static int32_t *backing_of; /* by file handle */
static size_t handles;

int baseline_backing_open(int fd) {
    struct backing_map map = {.fd = fd};
    int id = ioctl(device, BACKING_OPEN, &map);
    return id < 0 ? -errno : id;
}

void baseline_bind(uint64_t handle, int id) {
    if (handle >= handles) {
        size_t n = handle * 2 + 1024;
        backing_of = realloc(backing_of, n * sizeof *backing_of);
        memset(backing_of + handles, 0, (n - handles) * sizeof *backing_of);
        handles = n;
    }
    backing_of[handle] = id;
}

static ssize_t receive(int fd, void *buf, size_t len, void *userdata) {
    struct fuse_in_header *in = buf;
    ssize_t n = read(fd, buf, len);
    (void)userdata;
    if (n < (ssize_t)sizeof *in) return n;
    if (in->opcode == FUSE_INIT) init_unique = in->unique;
    else if (in->opcode == FUSE_OPEN || in->opcode == FUSE_CREATE)
        opening[(in->unique >> 1) % SLOTS] = in->unique;
    return n;
}

static ssize_t reply(int fd, struct iovec *iov, int count, void *userdata) {
    struct fuse_out_header *out = iov[0].iov_base;
    (void)userdata;
    if (out->error == 0 && count >= 2) {
        if (init_unique && out->unique == init_unique) {
            char *init = iov[1].iov_base; /* struct fuse_init_out */
            init_unique = 0;
            *(uint32_t *)(init + 12) |= INIT_EXT;
            *(uint32_t *)(init + 32) |= FLAGS2_PASSTHROUGH;
            *(uint32_t *)(init + 36) = 1; /* max_stack_depth */
        } else if (out->unique && opening[(out->unique >> 1) % SLOTS] == out->unique) {
            struct iovec *last = &iov[count - 1];
            struct fuse_open_out *open =
                (void *)((char *)last->iov_base + last->iov_len - sizeof *open);
            opening[(out->unique >> 1) % SLOTS] = 0;
            open->open_flags |= OPEN_NOFLUSH;
            if (open->fh < handles && backing_of[open->fh] > 0) {
                open->open_flags = (open->open_flags & ~3u) | OPEN_PASSTHROUGH;
                memcpy((char *)open + 12, &backing_of[open->fh], 4); /* backing_id */
            }
        }
    }
    return writev(fd, iov, count);
}

int fuse_session_mount(struct fuse_session *session, const char *mountpoint) {
    struct fuse_custom_io io = {.read = receive, .writev = reply};
    char options[256];
    device = atoi(getenv("BASELINE_DEVICE"));
    snprintf(options, sizeof options,
             "fd=%d,rootmode=40000,user_id=0,group_id=0,default_permissions,max_read=1048576",
             device);
    if (mount("baseline", mountpoint, "fuse.baseline", MS_NOSUID | MS_NODEV, options)) {
        perror("mount");
        return -1;
    }
    return fuse_session_custom_io(session, &io, device);
}
