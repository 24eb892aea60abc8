#!/bin/sh
# Installs the locked packages into /out. Runs in a system that was only unpacked from them, without network.
#   /tmp/debs/essential/*.deb, /tmp/debs/other/*.deb   the packages
#   /tmp/debs/expected                             "name version architecture" of each, sorted
set -eu
umask 022
export LC_ALL=C.UTF-8 TZ=UTC DEBIAN_FRONTEND=noninteractive DEBCONF_NONINTERACTIVE_SEEN=true

for directory in bin lib lib64 sbin; do
    mkdir -p "/out/usr/$directory"
    ln -s "usr/$directory" "/out/$directory"
done
mkdir -p /out/dev /out/tmp /out/var/lib/dpkg/info
mknod -m 666 /out/dev/null c 1 3
: > /out/var/lib/dpkg/status

# The packages' own scripts run inside /out and need a shell, coreutils, dpkg …: unpack those first, install afterwards.
for deb in /tmp/debs/essential/*.deb; do
    dpkg-deb --fsys-tarfile "$deb" | tar --extract --directory /out --keep-directory-symlink
done

install() {
    dpkg --root=/out --force-depends --force-unsafe-io --no-debsig --log=/dev/null \
        --path-exclude='/usr/share/doc/*' --path-include='/usr/share/doc/*/copyright' \
        --path-exclude='/usr/share/man/*' --path-exclude='/usr/share/info/*' --path-exclude='/usr/share/locale/*' \
        "$@"
}
install --install /tmp/debs/essential/base-passwd.deb /tmp/debs/essential/base-files.deb
install --unpack /tmp/debs/essential/*.deb
install --configure --pending
install --unpack /tmp/debs/other/*.deb
install --configure --pending

dpkg-query --admindir=/out/var/lib/dpkg --show --showformat='${Package} ${Version} ${Architecture} ${db:Status-Status}\n' \
    | sort > /tmp/installed
sed 's/$/ installed/' /tmp/debs/expected | diff -u - /tmp/installed

echo 'engine:x:65532:65532::/tmp:/usr/sbin/nologin' >> /out/etc/passwd
echo 'engine:x:65532:' >> /out/etc/group
# Nobody in a container needs another user's rights.
find /out -type f -perm /6000 -exec chmod ug-s {} +
# A named volume takes over the owner of the directory that it is mounted on.
mkdir /out/var/cache/engine
chown 65532:65532 /out/var/cache/engine
: > /out/etc/machine-id
# The container engine mounts these; if it had to make them first, each build step would change /etc.
: > /out/etc/hosts
: > /out/etc/resolv.conf

# What differs from run to run.
rm -rf /out/dev/* /out/tmp/* /out/run/* /out/var/cache/ldconfig /out/var/cache/debconf/*-old /out/var/lib/dpkg/*-old \
    /out/var/lib/dpkg/lock* /out/var/lib/dpkg/triggers/Lock /out/etc/passwd- /out/etc/group- /out/etc/shadow- /out/etc/gshadow-
find /out/var/log -type f -delete
find /out -depth -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
