# Prints what sensors/parse.rs reads: everything once.
r() { v=; { read -r v <"$1"; } 2>/dev/null; v=${v:--}; o="$o ${v%% *}"; }
n() { v=; { read -r v <"$1"; } 2>/dev/null; o="$o $v"; }
o="uptime"; r /proc/uptime; echo "$o"
for c in /sys/devices/system/cpu/cpu[0-9]*; do
  [ -d "$c" ] || continue
  o="core ${c##*/cpu}"
  r "$c/cpu_capacity"; r "$c/cpufreq/cpuinfo_max_freq"; r "$c/cpufreq/scaling_max_freq"
  r "$c/cpufreq/scaling_cur_freq"; echo "$o"
done
for z in /sys/class/thermal/thermal_zone[0-9]*; do
  [ -d "$z" ] || continue
  o="zone ${z##*/thermal_zone}"; r "$z/temp"; n "$z/type"; echo "$o"
done
for c in /sys/class/thermal/cooling_device[0-9]*; do
  [ -d "$c" ] || continue
  o=cooling; r "$c/cur_state"; r "$c/max_state"; n "$c/type"; echo "$o"
done
{ while read -r k v u; do
  case $k in MemTotal:) echo "total $v";; MemAvailable:) echo "available $v"; break;; esac
done </proc/meminfo; } 2>/dev/null
b=/sys/class/power_supply/battery; o=battery; r $b/current_now; r $b/capacity; r $b/temp; echo "$o"
if command -v dumpsys >/dev/null 2>&1; then
  dumpsys thermalservice 2>/dev/null | while read -r l; do echo "thermalservice $l"; done
  dumpsys battery 2>/dev/null | while read -r l; do echo "batteryservice $l"; done
fi
true
