// Shared by decode.cl and, in part, decode_batch.cl: NVIDIA's instructions, slots exchanged between work-groups,
// activations, products of packed rows.

#define WARPS 16
#define CEIL_DIV(a, b) (((a) + (b) - 1) / (b))
#define MAX_OF(a, b) ((a) > (b) ? (a) : (b))
#define MIN_OF(a, b) ((a) < (b) ? (a) : (b))
#define MAX_COLS MAX_OF(FFN_DIM, MAX_OF(DIM, Q_DIM))

// ---------------------------------------------------------------- instructions

// Loads weights, which are read only once.
uint4 load16(const __global uchar *p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

ushort load2(const __global uchar *p) {
    ushort v;
    asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(v) : "l"(p));
    return v;
}

// Index of the work-item, hidden from the compiler: values derived from it are computed where needed and not kept in
// registers for all layers.
uint hidden_local_id() {
    uint x = get_local_id(0);
    asm volatile("mov.u32 %0, %0;" : "+r"(x));
    return x;
}

float shuffle_xor(float x, uint mask) {
    float y;
    asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 31, -1;" : "=f"(y) : "f"(x), "r"(mask));
    return y;
}

uint shuffle_from(uint x, uint lane) {
    uint y;
    asm volatile("shfl.sync.idx.b32 %0, %1, %2, 31, -1;" : "=r"(y) : "r"(x), "r"(lane));
    return y;
}

float2 unpack_halves(uint bits) {
    float2 f;
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
        : "=f"(f.x), "=f"(f.y)
        : "r"(bits));
    return f;
}

float warp_max(float x) {
    for (uint m = 16; m > 0; m /= 2) x = fmax(x, shuffle_xor(x, m));
    return x;
}

// ---------------------------------------------------------------- exchange between work-groups

// Work-groups exchange slots: three words and the tag of the step that wrote them, sixteen bytes that are written and
// read at once. A reader polls a slot until it has the tag, so no fences or counters are needed. A slot is rewritten in
// the next layer, after everything its readers contributed to has been read.
typedef uint4 Slot;
#define SLOTS_PER_UNIT 6 // slots of sixteen rows
#define SLOTS_PER_BLOCK 3 // slots of a block of activations: eight words and a scale

// Polls before a work-group that never answers is given up: seconds.
#define MAX_POLLS (1 << 22)

void write_slot(__global Slot *to, uint a, uint b, uint c, uint tag) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(a), "r"(b), "r"(c), "r"(tag)
                 : "memory");
}

Slot poll_slot(const __global Slot *from) {
    Slot s;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(s.x), "=r"(s.y), "=r"(s.z), "=r"(s.w)
                 : "l"(from)
                 : "memory");
    return s;
}

// Returns `seen` if it has the tag, otherwise polls. Sets `lost` if nothing arrives.
Slot wait_for_slot(Slot seen, const __global Slot *from, uint tag, __global uint *lost) {
#pragma unroll 1
    for (uint poll_count = 0; seen.w != tag; poll_count++) {
        if (poll_count == MAX_POLLS) {
            asm volatile("st.relaxed.gpu.global.u32 [%0], 1; fence.acq_rel.gpu;" ::"l"(lost) : "memory");
            break;
        }
        seen = poll_slot(from);
    }
    return seen;
}

// Sends sixteen adjacent rows, one per lane of sixteen; `put` is true for lanes with an existing row. All lanes of a
// warp must take part.
void send_rows(float y, bool put, __global Slot *to, uint tag) {
    const uint part = get_local_id(0) % 16, from = get_local_id(0) / 16 % 2 * 16 + 3 * part;
    uint a = shuffle_from(as_uint(y), from), b = shuffle_from(as_uint(y), from + 1), c = shuffle_from(as_uint(y), from + 2);
    if (put && part < SLOTS_PER_UNIT) write_slot(to + part, a, b, c, tag);
}

// Quantises and sends a block of activations, one per lane of a warp.
void send_block(float y, __global Slot *to, uint tag) {
    const uint lane = get_local_id(0) % 32;
    float2 scale = activation_scale(warp_max(fabs(y)));
    uint word = (uint)as_uchar(convert_char(rint(y * scale.y))) << lane % 4 * 8;
    word |= shuffle_from(word, lane ^ 1);
    word |= shuffle_from(word, lane ^ 2);
    uint a = shuffle_from(word, 12 * lane), b = shuffle_from(word, 12 * lane + 4), c = shuffle_from(word, 12 * lane + 8);
    if (lane < SLOTS_PER_BLOCK) write_slot(to + lane, a, b, lane == 2 ? as_uint(scale.x) : c, tag);
}

// ---------------------------------------------------------------- activations

// Position of word k of a block, such that a work-item reads words v and v + 4 at once.
#define WORD_POSITION(k) ((k) % 4 * 2 + (k) / 4)

// Maximum slots that a work-item has to wait for at once.
#define MAX_SLOTS_PER_ITEM CEIL_DIV(MAX_OF(MAX_COLS / 32 * SLOTS_PER_BLOCK, DIM / 16 * SLOTS_PER_UNIT), WG)

// Polls `slots` slots once, before any of them is waited for.
void poll_slots(Slot *seen_slots, const __global Slot *from, uint slots, uint lid) {
    for (uint i = 0; i < MAX_SLOTS_PER_ITEM; i++)
        if (i * WG < slots) seen_slots[i] = poll_slot(from + min(i * WG + lid, slots - 1));
}

// Receives blocks quantised by another step.
void receive_blocks(const __global Slot *from, uint blocks, uint tag, __local uint *acts, __local float *scales,
                 __global uint *sync) {
    const uint slots = blocks * SLOTS_PER_BLOCK, lid = hidden_local_id();
    Slot seen_slots[MAX_SLOTS_PER_ITEM];
    barrier(CLK_LOCAL_MEM_FENCE);
    poll_slots(seen_slots, from, slots, lid);
    for (uint i = 0; i < MAX_SLOTS_PER_ITEM; i++) {
        if (i * WG >= slots) continue;
        uint at = min(i * WG + lid, slots - 1), block = at / SLOTS_PER_BLOCK, k = at % SLOTS_PER_BLOCK * 3;
        Slot s = wait_for_slot(seen_slots[i], from + at, tag, sync);
        acts[block * 8 + WORD_POSITION(k)] = s.x;
        acts[block * 8 + WORD_POSITION(k + 1)] = s.y;
        if (k < 6)
            acts[block * 8 + WORD_POSITION(k + 2)] = s.z;
        else
            scales[block] = as_float(s.z);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
}

// A chain of dependent steps loads its operands PREFETCHED_STEPS steps in advance, even past the end: PREFETCH_MARGIN
// words of local memory follow.
#define PREFETCHED_STEPS 16
#define PREFETCH_MARGIN (2 * PREFETCHED_STEPS)

// Adds the squares of one of sixteen lanes.
float sum_squares(const __local float *x) {
    enum { all = DIM / 16 };
    float acc = 0.0f, next[PREFETCHED_STEPS];
    x += get_local_id(0);
    for (uint k = 0; k < PREFETCHED_STEPS; k++) next[k] = x[k * 16];
#pragma unroll 2
    for (uint i = 0; i < all; i += PREFETCHED_STEPS) {
        float now[PREFETCHED_STEPS];
        for (uint k = 0; k < PREFETCHED_STEPS; k++) now[k] = next[k];
        for (uint k = 0; k < PREFETCHED_STEPS; k++) next[k] = x[(i + PREFETCHED_STEPS + k) * 16];
        for (uint k = 0; k < PREFETCHED_STEPS; k++)
            if (all % PREFETCHED_STEPS == 0 || i + k < all) acc = fma(now[k], now[k], acc);
    }
    return acc;
}

// RMS norm of the residual, quantised, computed by every work-group for itself. The residual comes from `slots`, or for
// the first layer from `first`. Only its dependents wait for it.
void norm(const __global Slot *slots, const __global float *first, const __global float *w, uint tag,
          __local float *x, __local uint *acts, __local float *scales, __local float *red, __global uint *sync) {
    const uint lid = hidden_local_id();
    float4 weights[CEIL_DIV(DIM, 4 * WG)];
    for (uint i = 0; i < CEIL_DIV(DIM, 4 * WG); i++) weights[i] = vload4(0, w + min((i * WG + lid) * 4, (uint)DIM - 4));
    barrier(CLK_LOCAL_MEM_FENCE);
    if (first) {
        for (uint i = lid; i < DIM; i += WG) x[i] = first[i];
    } else {
        enum { all = DIM / 16 * SLOTS_PER_UNIT };
        Slot seen_slots[MAX_SLOTS_PER_ITEM];
        poll_slots(seen_slots, slots, all, lid);
        for (uint i = 0; i < CEIL_DIV(all, WG); i++) {
            uint at = min((uint)(i * WG + lid), (uint)all - 1), part = at % SLOTS_PER_UNIT;
            Slot s = wait_for_slot(seen_slots[i], slots + at, tag, sync);
            __local float *to = x + at / SLOTS_PER_UNIT * 16 + part * 3;
            to[0] = as_float(s.x);
            if (part < SLOTS_PER_UNIT - 1) {
                to[1] = as_float(s.y);
                to[2] = as_float(s.z);
            }
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lid < 16) red[lid] = sum_squares(x);
    barrier(CLK_LOCAL_MEM_FENCE);
    float scale = divide(1.0f, sqrt_rn(divide(sum_lanes(red), (float)DIM) + NORM_EPS));
    for (uint i = 0; i < CEIL_DIV(DIM, 4 * WG); i++) {
        uint at = (i * WG + lid) * 4;
        float4 v = at < DIM ? *(__local float4 *)(x + at) * scale * weights[i] : (float4)(0.0f);
        float m = fmax(fmax(fabs(v.x), fabs(v.y)), fmax(fabs(v.z), fabs(v.w)));
        for (uint k = 1; k < 8; k *= 2) m = fmax(m, shuffle_xor(m, k));
        float2 d = activation_scale(m);
        if (at < DIM) {
            acts[at / 32 * 8 + WORD_POSITION(at / 4 % 8)] = as_uint(convert_char4(rint(v * d.y)));
            if (lid % 8 == 0) scales[at / 32] = d.x;
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
}

// ---------------------------------------------------------------- products

// A unit is sixteen rows. A fragment is two blocks of a unit: the 512 contiguous bytes that a warp takes at once. A
// lane has four rows (lane / 4 % 4) of one vector (lane % 4) of one block (lane / 16), and the scale of the row whose
// sum it will hold (lane % 16).
typedef struct {
    uint4 quants;
    ushort scale;
} Fragment;

// Fragments of a matrix, numbered from the first one of a work-group's units; those from number `half_start` on are
// `gap` further.
typedef struct {
    const __global uchar *quants, *scales;
    uint half_start, gap;
} Units;

Units units_from(const __global uchar *quants, const __global uchar *scales, uint first_fragment, uint half_start,
                 uint gap) {
    Units u = {quants + (size_t)first_fragment * 512, scales + (size_t)first_fragment * 64, half_start, gap};
    return u;
}

// Maximum fragments that a warp loads ahead.
#ifndef DEPTH
#define DEPTH 4
#endif

// Offsets the pointers for one lane.
Units units_of_lane(Units u, uint lane) {
    u.quants += lane / 16 * 256 + lane % 4 * 64 + lane / 4 % 4 * 16;
    u.scales += lane * 2;
    return u;
}

Fragment load_fragment(Units u, uint i) {
    uint at = i + (i < u.half_start ? 0 : u.gap);
    Fragment b;
    b.quants = load16(u.quants + (size_t)at * 512);
    b.scale = load2(u.scales + (size_t)at * 64);
    return b;
}

#define SUM_BIAS 0x80000

// Computes sixteen times the sum of a lane's row and block, plus SUM_BIAS, on the integer tensor cores. A nibble in the
// upper half of a byte, with its highest bit flipped, is sixteen times its weight, signed. The rows of an operand are
// the lanes' rows, two at a time, of both blocks; its columns alternate between the activations of the two blocks, so
// every lane gets the sums of its four rows and keeps one.
uint sixteen_sums(uint4 w, uint2 a, uint mask, uint lane) {
    uint4 h = (w & mask) ^ 0x80808080u, l = ((w << 4) & mask) ^ 0x80808080u;
    int c[8];
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(l.x), "r"(l.y), "r"(h.x), "r"(h.y), "r"(a.x), "r"(a.y), "r"(SUM_BIAS));
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=r"(c[4]), "=r"(c[5]), "=r"(c[6]), "=r"(c[7])
        : "r"(l.z), "r"(l.w), "r"(h.z), "r"(h.w), "r"(a.x), "r"(a.y), "r"(SUM_BIAS));
    bool second = lane & 16;
    int r0 = second ? c[1] : c[0], r1 = second ? c[3] : c[2], r2 = second ? c[5] : c[4], r3 = second ? c[7] : c[6];
    return lane & 2 ? (lane & 1 ? r3 : r2) : (lane & 1 ? r1 : r0);
}

// Sums of blocks wait here to be added in ascending order: [row][block], as a float with its scale, or, if there is no
// room for that, both in sixteen bits. Rows are two words longer than needed, so that neither writers nor readers have
// bank conflicts.
#define FLOATS_ROW(blocks) (2 * (blocks) + 2)
#define HALVES_ROW(blocks) ((blocks) + 2)
// Units for which there is room.
#define UNITS_AS_FLOATS(blocks) (PARTS / (16 * FLOATS_ROW(blocks)))
#define UNITS_AS_HALVES(blocks) (PARTS / (16 * HALVES_ROW(blocks)))

// Unit, and pair of blocks, of a warp's fragment j. In this form both are compile-time constants, except for the warp,
// if all warps take part in a unit equally.
#define UNIT_OF(j, pairs, warp) ((pairs) % WARPS == 0 ? (j) / MAX_OF((pairs) / WARPS, 1) : ((j) * WARPS + (warp)) / (pairs))
#define PAIR_OF(j, pairs, warp) \
    ((pairs) % WARPS == 0 ? (j) % MAX_OF((pairs) / WARPS, 1) * WARPS + (warp) : ((j) * WARPS + (warp)) % (pairs))

// Fragments whose sums are computed before any of them is stored.
#define FRAGMENTS_AT_ONCE 4

// Number of a warp's `n` fragments that are loaded ahead.
#define DEPTH_FOR(n) MIN_OF(n, DEPTH)

// Loads the first of `all` fragments shared by the warps; each warp has `count` per round.
void load_fragments(Fragment *b, Units u, uint count, uint all) {
    const uint lid = hidden_local_id();
    u = units_of_lane(u, lid % 32);
#pragma unroll
    for (uint j = 0; j < DEPTH; j++)
        if (j < DEPTH_FOR(count)) b[j] = load_fragment(u, min(j * WARPS + lid / 32, all - 1));
}

// Computes the sums of a round, which has room for `room` fragments and starts with number `from` of `all`, while the
// following fragments are loaded.
void mma_accumulate(Fragment *b, Units u, uint pairs, uint room, uint from, uint all, bool floats, const __local uint *acts,
          const __local float *act_scales, __local uint *parts, uint mask) {
    const uint count = CEIL_DIV(room, WARPS), lid = hidden_local_id(), warp = lid / 32, lane = lid % 32;
    // If the number of fragments is not a multiple of those loaded ahead, the last iteration is not full, but still
    // loads the next round's.
    const uint unfilled = CEIL_DIV(count, DEPTH_FOR(count)) * DEPTH_FOR(count) - count;
    u = units_of_lane(u, lane);
#pragma unroll 1
    for (uint first = 0; first < count; first += DEPTH_FOR(count)) {
#pragma unroll
        for (uint m = 0; m < DEPTH; m += FRAGMENTS_AT_ONCE) {
            uint sum[FRAGMENTS_AT_ONCE];
            float scale[FRAGMENTS_AT_ONCE];
#pragma unroll
            for (uint k = 0; k < FRAGMENTS_AT_ONCE; k++) {
                if (m + k >= DEPTH_FOR(count)) continue;
                uint j = first + m + k, i = j * WARPS + warp, block = PAIR_OF(j, pairs, warp) * 2;
                uint2 a = *(const __local uint2 *)(acts + (block + lane / 4 % 2) * 8 + lane % 4 * 2);
                sum[k] = sixteen_sums(b[m + k].quants, a, mask, lane);
                scale[k] = floats ? unpack_halves(b[m + k].scale).x * act_scales[block + lane / 16] : 0.0f;
                if (!floats) sum[k] = sum[k] << 12 | b[m + k].scale;
                i += from + DEPTH_FOR(count) * WARPS;
                if (unfilled > 0 && first + DEPTH_FOR(count) >= count) i -= unfilled * WARPS;
                if (i < all) b[m + k] = load_fragment(u, i);
            }
#pragma unroll
            for (uint k = 0; k < FRAGMENTS_AT_ONCE; k++) {
                uint j = first + m + k, i = j * WARPS + warp, row = UNIT_OF(j, pairs, warp) * 16 + lane % 16;
                uint block = PAIR_OF(j, pairs, warp) * 2 + lane / 16;
                // Past the last fragment the values are undefined and never read.
                if (m + k >= DEPTH_FOR(count) || ((room % WARPS != 0 || unfilled > 0) && i >= room)) continue;
                if (floats) {
                    // The integer added to the bits of 2^23 is a float; dividing by 16 and everything else is exact.
                    float whole = fma(as_float(0x4b000000u | sum[k]), 0.0625f, -(8388608.0f + SUM_BIAS) / 16.0f);
                    *(__local float2 *)(parts + row * FLOATS_ROW(2 * pairs) + 2 * block) = (float2)(whole, scale[k]);
                } else {
                    parts[row * HALVES_ROW(2 * pairs) + block] = sum[k];
                }
            }
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
}

// Sum of a row, in the specified order.
float sum_of_floats(const __local uint *row, uint blocks) {
    const __local float2 *parts = (const __local float2 *)row;
    float acc = 0.0f;
    float2 next[PREFETCHED_STEPS];
    for (uint k = 0; k < PREFETCHED_STEPS; k++) next[k] = parts[k];
#pragma unroll 2
    for (uint b = 0; b < blocks; b += PREFETCHED_STEPS) {
        float2 now[PREFETCHED_STEPS];
        for (uint k = 0; k < PREFETCHED_STEPS; k++) now[k] = next[k];
        for (uint k = 0; k < PREFETCHED_STEPS; k++) next[k] = parts[b + PREFETCHED_STEPS + k];
        for (uint k = 0; k < PREFETCHED_STEPS; k++)
            if (blocks % PREFETCHED_STEPS == 0 || b + k < blocks) acc = fma(now[k].x, now[k].y, acc);
    }
    return acc;
}

float sum_of_halves(const __local uint *row, const __local float *act_scales, uint blocks) {
    const float bias = 8388608.0f + SUM_BIAS / 16;
    float acc = 0.0f;
    uint2 next[PREFETCHED_STEPS / 2];
    float2 next_scales[PREFETCHED_STEPS / 2];
    const __local uint2 *parts = (const __local uint2 *)row;
    const __local float2 *scales = (const __local float2 *)act_scales;
    for (uint k = 0; k < PREFETCHED_STEPS / 2; k++) {
        next[k] = parts[k];
        next_scales[k] = scales[k];
    }
#pragma unroll 2
    for (uint b = 0; b < blocks / 2; b += PREFETCHED_STEPS / 2) {
        float2 sum[PREFETCHED_STEPS / 2], scale[PREFETCHED_STEPS / 2];
        for (uint k = 0; k < PREFETCHED_STEPS / 2; k++) {
            sum[k] = (float2)(as_float(0x4b000000u | next[k].x >> 16), as_float(0x4b000000u | next[k].y >> 16)) - bias;
            scale[k] = (float2)(unpack_halves(next[k].x).x, unpack_halves(next[k].y).x) * next_scales[k];
        }
        for (uint k = 0; k < PREFETCHED_STEPS / 2; k++) {
            next[k] = parts[b + PREFETCHED_STEPS / 2 + k];
            next_scales[k] = scales[b + PREFETCHED_STEPS / 2 + k];
        }
        for (uint k = 0; k < PREFETCHED_STEPS / 2; k++) {
            if (blocks % PREFETCHED_STEPS != 0 && b + k >= blocks / 2) continue;
            acc = fma(sum[k].x, scale[k].x, acc);
            acc = fma(sum[k].y, scale[k].y, acc);
        }
    }
    return acc;
}
