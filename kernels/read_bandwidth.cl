// Reads a buffer as fast as the device can, for comparison with decode, which reads every weight once. Adjacent
// work-items read adjacent vectors; each work-item has eight loads in flight.

#define LOADS_AHEAD 8

__kernel void read_bandwidth(const __global uint4 *from, __global uint *sums, int vectors) {
    const int items = get_global_size(0), item = get_global_id(0);
    uint4 sum = 0;
    for (int at = item; at + (LOADS_AHEAD - 1) * items < vectors; at += LOADS_AHEAD * items) {
        for (int i = 0; i < LOADS_AHEAD; i++) sum ^= from[at + i * items];
    }
    // Never true, but the compiler does not know that.
    if ((sum.x ^ sum.y ^ sum.z ^ sum.w) == 0x9e3779b9u) sums[0] = item;
}
