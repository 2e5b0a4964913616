// What decode_nvidia.cl is made of: NVIDIA's instructions, a barrier over all groups, activations, products of packed
// rows.

#define WARPS 16
#define UP(a, b) (((a) + (b) - 1) / (b))
#define WIDER(a, b) ((a) > (b) ? (a) : (b))
#define WIDEST WIDER(FFN_DIM, WIDER(DIM, Q_DIM))

// ---------------------------------------------------------------- instructions

uint4 load16(const __global uchar *p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

uint2 load8(const __global uchar *p) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}

// What another group has written in this launch: not from the first-level cache, which does not hear of it.
float4 fresh4(const __global float *p) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

float fresh(const __global float *p) {
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
    return v;
}

float across(float x, uint mask) {
    float y;
    asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 31, -1;" : "=f"(y) : "f"(x), "r"(mask));
    return y;
}

float2 two_halves(uint bits) {
    float2 f;
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
        : "=f"(f.x), "=f"(f.y)
        : "r"(bits));
    return f;
}

float warp_sum(float x) {
    for (uint m = 16; m > 0; m /= 2) x += across(x, m);
    return x;
}

float warp_max(float x) {
    for (uint m = 16; m > 0; m /= 2) x = fmax(x, across(x, m));
    return x;
}

// ---------------------------------------------------------------- the barrier over all groups

// Polls until a group that never comes is given up: seconds.
#define PATIENCE (1 << 24)

void arrive(__global uint *counter) {
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    if (get_local_id(0) == 0)
        asm volatile("fence.acq_rel.gpu; red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

// `target` counts arrivals since the backend began, modulo 2^32. Without them, the logits say so: NaN.
void await(__global uint *counter, uint *target, __global float *logits) {
    *target += GRID;
    if (get_local_id(0) == 0) {
        uint seen, polls = 0;
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
        } while ((int)(seen - *target) < 0 && ++polls < PATIENCE);
        if (polls == PATIENCE) logits[0] = NAN;
    }
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
}

// ---------------------------------------------------------------- activations

// Four neighbours as signed bytes; eight lanes share a block and its scale.
uint quantise4(float4 x, float *scale) {
    float m = fmax(fmax(fabs(x.x), fabs(x.y)), fmax(fabs(x.z), fabs(x.w)));
    m = fmax(m, across(m, 1));
    m = fmax(m, across(m, 2));
    m = fmax(m, across(m, 4));
    *scale = m / 127.0f;
    return as_uint(convert_char4(rint(x * (m > 0.0f ? 127.0f / m : 0.0f))));
}

// RMS norm of the residual, quantised, in every group for itself.
void norm(const __global float *x, const __global float *w, __local uint *acts, __local float *scales,
          __local float *sums) {
    const uint lid = get_local_id(0);
    float4 v[UP(DIM, 4 * WG)];
    float squares = 0.0f;
    for (uint i = 0; i < UP(DIM, 4 * WG); i++) {
        uint at = (i * WG + lid) * 4;
        v[i] = at < DIM ? fresh4(x + at) : (float4)(0.0f);
        squares += dot(v[i], v[i]);
    }
    squares = warp_sum(squares);
    if (lid % 32 == 0) sums[lid / 32] = squares;
    barrier(CLK_LOCAL_MEM_FENCE);
    squares = 0.0f;
    for (uint i = 0; i < WARPS; i++) squares += sums[i];
    float inverse = 1.0f / sqrt(squares / DIM + NORM_EPS);
    for (uint i = 0; i < UP(DIM, 4 * WG); i++) {
        uint at = (i * WG + lid) * 4;
        if (at < DIM) {
            float scale;
            acts[at / 4] = quantise4(v[i] * inverse * vload4(0, w + at), &scale);
            if (lid % 8 == 0) scales[at / 32] = scale;
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
}

// What an earlier step has quantised.
void fetch(const __global float *from, const __global float *from_scales, uint cols, __local uint *acts,
           __local float *scales) {
    const uint lid = get_local_id(0);
    for (uint i = lid * 4; i < cols / 4; i += WG * 4) vstore4(as_uint4(fresh4(from + i)), 0, acts + i);
    for (uint i = lid; i < cols / 32; i += WG) scales[i] = fresh(from_scales + i);
    barrier(CLK_LOCAL_MEM_FENCE);
}

// Four neighbours of `x` in local memory by each of `items` items (whole warps take part), to global memory.
void put_acts(const __local float *x, uint items, __global float *acts, __global float *scales) {
    const uint lid = get_local_id(0);
    if (lid < UP(items, 32) * 32) {
        float scale;
        uint words = quantise4(lid < items ? vload4(lid, x) : (float4)(0.0f), &scale);
        if (lid < items) acts[lid] = as_float(words);
        if (lid < items && lid % 8 == 0) scales[lid / 8] = scale;
    }
}

// ---------------------------------------------------------------- products

// What one lane takes of eight rows and four blocks: four rows, eight columns.
typedef struct {
    uint4 quants;
    uint2 scales;
} Bite;

Bite bite(const __global uchar *quants, const __global uchar *scales, uint unit, uint blocks, uint block) {
    const uint lane = get_local_id(0) % 32;
    size_t at = (size_t)(unit / 2) * blocks + block + lane / 8;
    Bite b;
    b.quants = load16(quants + at * 256 + lane / 2 % 4 * 64 + unit % 2 * 32 + lane % 2 * 16);
    b.scales = load8(scales + at * 32 + unit % 2 * 16 + lane % 2 * 8);
    return b;
}

// The activations that a lane's bites meet. Sums of a vector start from `start` so that they end as floats: the
// exact integer added to the bits of 1.5 * 2^23.
typedef struct {
    uint low, high;
    int start;
    float scale;
} Act;

#define FLOAT_ZERO 0x4b400000

Act act_of(const __local uint *acts, const __local float *scales, uint block) {
    const uint lane = get_local_id(0) % 32, at = block + lane / 8;
    Act a;
    a.low = acts[at * 8 + lane / 2 % 4];
    a.high = acts[at * 8 + 4 + lane / 2 % 4];
    a.start = FLOAT_ZERO - dot4(0x08080808u, a.low, dot4(0x08080808u, a.high, 0));
    a.scale = scales[at];
    return a;
}

float4 chew(Bite b, Act a, float4 acc) {
    uint4 l = b.quants & 0x0f0f0f0fu, h = (b.quants >> 4) & 0x0f0f0f0fu;
    int4 bits = (int4)(dot4(h.x, a.high, dot4(l.x, a.low, a.start)), dot4(h.y, a.high, dot4(l.y, a.low, a.start)),
                       dot4(h.z, a.high, dot4(l.z, a.low, a.start)), dot4(h.w, a.high, dot4(l.w, a.low, a.start)));
    float4 sum = as_float4(bits);
    float2 low = two_halves(b.scales.x), high = two_halves(b.scales.y);
    return fma(sum - as_float(FLOAT_ZERO), (float4)(low, high) * a.scale, acc);
}

// Sums over the lanes of a warp that share rows; a lane below 8 ends with row `folded_row`.
float fold(float4 acc) {
    const uint lane = get_local_id(0) % 32;
    bool upper = lane & 2;
    float2 send = upper ? acc.xy : acc.zw, keep = upper ? acc.zw : acc.xy;
    keep += (float2)(across(send.x, 2), across(send.y, 2));
    upper = lane & 4;
    float row = (upper ? keep.y : keep.x) + across(upper ? keep.x : keep.y, 4);
    row += across(row, 8);
    return row + across(row, 16);
}

uint folded_row() {
    const uint lane = get_local_id(0) % 32;
    return lane % 2 * 4 + (lane & 2) + lane / 4 % 2;
}
