#!/bin/sh
# Runs test_nfs.py on two NFS mounts of one export, by the server and the client of Linux, on a Debian machine whose own
# kernel has neither: in User Mode Linux, a kernel that is a program. Run it as root. Its root folder is that of this
# machine, so that the virtual environment is there; what tests write lies in its memory.
#
#     sh tests/run/nfs.sh [PYTEST ARGUMENTS]          VERS=3 sh tests/run/nfs.sh
#
# The packages are unpacked below build/nfs, not installed.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
place="$root/build/nfs"
if [ "${1:-}" != --inside ]; then
    mkdir -p "$place/debs"
    if [ ! -e "$place/usr/bin/linux.uml" ]; then
        (cd "$place/debs" && apt-get download user-mode-linux nfs-kernel-server nfs-common rpcbind kmod libkmod2 libtirpc3 \
            libtirpc-common libnfsidmap1 libevent-core-2.1-7 libwrap0 libkeyutils1)
        for package in "$place"/debs/*.deb; do dpkg -x "$package" "$place"; done
        ln -sfn "$place/usr/lib/uml/modules" "$place/lib/modules"
    fi
    printf '#!/bin/sh\nVERS=%s exec sh %s --inside %s\n' "${VERS:-4.2}" "$root/tests/run/nfs.sh" "$*" > "$place/init"
    chmod +x "$place/init"
    rm -f "$place/passed"
    "$place/usr/bin/linux.uml" mem=2G root=/dev/root rootfstype=hostfs rootflags=/ rw "init=$place/init" con=null \
        con0=null,fd:1 quiet
    exec test -e "$place/passed"
fi
shift
export LD_LIBRARY_PATH="$place/usr/lib/x86_64-linux-gnu:$place/lib/x86_64-linux-gnu" HOME=/root PYTHONDONTWRITEBYTECODE=1
export PATH="$place/sbin:$place/usr/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
mount -t proc proc /proc
mount -t sysfs sys /sys
mkdir -p /dev/shm
for folder in /run /mnt /var/lib /dev/shm; do mount -t tmpfs tmpfs $folder; done
mkdir -p /run/tmp /mnt/export /mnt/a /mnt/b /var/lib/nfs/sm /var/lib/nfs/sm.bak /var/lib/nfs/v4recovery
touch /var/lib/nfs/etab /var/lib/nfs/rmtab /var/lib/nfs/state
cp -a /etc /run/etc && mount --bind /run/etc /etc
cp "$place/etc/netconfig" /etc/
echo "127.0.0.1 localhost" > /etc/hosts
printf 'udp 17 UDP\ntcp 6 TCP\n' >> /etc/protocols
printf '_rpc:x:120:65534::/run:/bin/false\nstatd:x:121:65534::/run:/bin/false\n' >> /etc/passwd
echo "/mnt/export 127.0.0.1(rw,sync,fsid=0,no_root_squash,no_subtree_check,insecure)" > /etc/exports
ip link set lo up
ln -s "$place/bin/kmod" /run/modprobe
echo /run/modprobe > /proc/sys/kernel/modprobe
for module in nfsd nfs nfsv4 nfsv3; do /run/modprobe -d "$place" $module; done
mount -t nfsd nfsd /proc/fs/nfsd
# The mounts of one kernel are one client to the server, which would delegate to it what its other mount is writing.
echo 0 > /proc/sys/fs/leases-enable
rpcbind -w
exportfs -a
rpc.statd --no-notify
rpc.mountd
rpc.nfsd 8
from=/
[ "$VERS" != 3 ] || from=/mnt/export
for mount in a b; do mount.nfs4 127.0.0.1:$from /mnt/$mount -o "vers=$VERS,nosharecache,hard"; done
grep ' nfs' /proc/mounts
cd "$root"
unset LD_LIBRARY_PATH
if TMPDIR=/run/tmp DATAMAT_TEST_NFS=/mnt/a:/mnt/b .venv/bin/python -m pytest tests/run/test_nfs.py -p no:cacheprovider "$@"; then
    touch "$place/passed"
fi
echo o > /proc/sysrq-trigger
sleep 10
