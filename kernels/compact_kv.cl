// Eviction: compacts the rows to keep of a head to the front, in place. One work-group per head works from front to
// back: it always reads behind everything it has written, because row i comes from slot i or a later one.
//
// plane: [kv_head][rows][units], rows in units of two bytes; slots: [kv_head][kept], ascending
// shape: units per row, rows per head, rows to keep

// Units per work-item in an iteration.
#define UNITS_PER_ITEM 8

__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void compact_kv(
    __global ushort *plane, const __global uint *slots, int4 shape) {
    int lid = get_local_id(0), head = get_group_id(0), units = shape.x, all = shape.z * units;
    plane += (size_t)head * shape.y * units;
    slots += (size_t)head * shape.z;
    for (int first = 0; first < all; first += WG * UNITS_PER_ITEM) {
        ushort held[UNITS_PER_ITEM];
        for (int e = 0; e < UNITS_PER_ITEM; e++) {
            // Same number of iterations for every work-item; see gemv.cl.
            int at = min(first + e * WG + lid, all - 1);
            held[e] = plane[(size_t)slots[at / units] * units + at % units];
        }
        barrier(CLK_GLOBAL_MEM_FENCE);
        for (int e = 0; e < UNITS_PER_ITEM; e++) {
            int at = first + e * WG + lid;
            if (at < all) plane[at] = held[e];
        }
        barrier(CLK_GLOBAL_MEM_FENCE);
    }
}
