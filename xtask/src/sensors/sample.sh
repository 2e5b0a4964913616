# Prints a line a sample for sensors/sampler.rs until process $pid has ended. $stop: seconds until it is
# interrupted, $service and $shared: of how many samples one has temperatures of the service, and shared memory.
r() { v=; { read -r v <"$1"; } 2>/dev/null; v=${v:--}; v=${v%% *}; o="$o $v"; }
now() { u=; { read -r u v </proc/uptime; } 2>/dev/null; u=${u%%.*}; u=${u:-0}; }
now; end=$((u + ${stop:-0})); n=0
while [ -d "/proc/$pid" ]; do
o=; for f in $files; do r "$f"; done
if [ -n "$service" ] && [ $((n % service)) -eq 0 ]; then
dumpsys thermalservice 2>/dev/null | while read -r l; do echo "service $l"; done
fi
a=-; { while read -r k v u; do case $k in MemAvailable:) a=$v; break;; esac; done </proc/meminfo; } 2>/dev/null
m=-; { while read -r k v u; do case $k in VmRSS:) m=$v; break;; esac; done </proc/$pid/status; } 2>/dev/null
s=-; if [ $((n % shared)) -eq 0 ]; then
{ while read -r k v u; do case $k in Pss:) s=$v; break;; esac; done </proc/$pid/smaps_rollup; } 2>/dev/null
fi
t=; for d in /proc/$pid/task/*; do
l=; { read -r l <"$d/stat"; } 2>/dev/null; [ -n "$l" ] || continue
set -- ${l##*) }; t="$t ${d##*/}:${37}:$((${12} + ${13}))"
done
echo "sample$o $a $m $s$t"
now
if [ -n "$stop" ] && [ "$u" -ge "$end" ]; then kill -INT "$pid"; stop=; fi
n=$((n + 1)); sleep "$pause" 2>/dev/null || sleep 1
done
