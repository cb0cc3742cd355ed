#!/bin/bash
# A machine for the commands of a document: run in new namespaces of mounts, processes and network.
# What is in /mnt, /data, /run, /var/lib and /var/log is of this run only; all else is this machine's.
# Everything ends with the first process.
#
#     enter.sh FOLDER COMMAND...
set -euo pipefail
root=$1/root
shift
mkdir "$root"
mount --make-rprivate /
umount --all --lazy --types fuse.kvfs # or their unmounts elsewhere would wait for this one
mount -t tmpfs tmpfs "$root"
mount --make-unbindable "$root"
for entry in /*; do
    if [ -L "$entry" ]; then
        cp --no-dereference "$entry" "$root$entry"
    elif [ -d "$entry" ]; then
        mkdir "$root$entry"
        mount --rbind "$entry" "$root$entry"
    fi
done
mkdir --parents "$root/data"
for place in mnt data run var/lib var/log; do
    # Sparse, and larger than any size in a document.
    mount -t tmpfs -o size=4T,mode=755 tmpfs "$root/$place"
done
# `kvfs setup` writes there.
mkdir "$root/.own"
mount -t tmpfs tmpfs "$root/.own"
for own in usr/sbin usr/local; do
    mkdir --parents "$root/.own/new/$own" "$root/.own/work/$own"
    mount -t overlay overlay "$root/$own" \
        -o "lowerdir=/$own,upperdir=$root/.own/new/$own,workdir=$root/.own/work/$own"
done
ip link set lo up
ip address add 10.1.0.1/16 dev lo # servers look for one that is not 127.0.0.1
exec chroot "$root" "$@"
