"""`deploy tune`: which settings win on this host, by paired measurements that stop when they have decided."""
