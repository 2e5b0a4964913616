// Put before every kernel: the model's dimensions under their Rust names, number formats, and what several
// steps share. OpenCL C 1.2; no half arithmetic, no subgroups, no images.

#if !defined(LAYERS) || !defined(DIM) || !defined(HEADS) || !defined(KV_HEADS) || !defined(HEAD_DIM) || \
    !defined(FFN_DIM) || !defined(VOCAB) || !defined(Q_DIM) || !defined(KV_DIM) || !defined(GROUP) || \
    !defined(Q_PAD) || !defined(KV_PAD) || !defined(QKV) || !defined(RMS_EPS) || !defined(WG)
#error a dimension of the model or the work-group size WG is not defined
#endif

// How a matrix is stored: packed Q4_0 (src/quant/packed.rs), or row-major as in the checkpoint.
#define W_Q4 0
#define W_F32 1
#define W_F16 2
#define W_BF16 3

// The state of one forward pass: a header of integers, then one row per token.
// [HEADER] int, [token][x: DIM | cos: HEAD_DIM / 2 | sin: HEAD_DIM / 2] float
#define HEADER 16
#define H_TOKENS 0 // tokens of this pass
#define H_SLOT 1   // cache slot of the first of them
#define H_ROW 2    // token whose residual the head reads
#define X_ROW (DIM + HEAD_DIM)
#define ROW(state, t) ((state) + HEADER + (size_t)(t) * X_ROW)

// Larger than no score: masks stay finite.
#define LEAST -1e30f

// A stored half as a float, whatever its alignment.
float from_half(uint bits) {
    ushort h = (ushort)bits;
    return vload_half(0, (const __private half *)&h);
}

// Sum of four products: unsigned bytes of `u`, signed bytes of `s`.
int dot4(uint u, uint s, int acc) {
#ifdef DOT_PTX
    // NVIDIA: one instruction, from compute capability 6.1 on.
    asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(acc) : "r"(u), "r"(s));
    return acc;
#else
    uchar4 a = as_uchar4(u);
    char4 b = as_char4(s);
    return acc + a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
#endif
}

// Sum over the work-group of one value per item, the same in every item. `red` has WG elements.
float sum_all(float x, __local float *red) {
    int lid = get_local_id(0);
    red[lid] = x;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int stride = WG / 2; stride > 0; stride /= 2) {
        if (lid < stride) red[lid] += red[lid + stride];
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    float sum = red[0];
    barrier(CLK_LOCAL_MEM_FENCE);
    return sum;
}

// Eight stored activations as two words of signed bytes; `id` is 127 / max|x| of their block of 32, or 0.
uint2 quantise8(float8 x, float id) {
    char8 q = convert_char8(rint(x * id));
    return (uint2)(as_uint(q.lo), as_uint(q.hi));
}

float most8(float8 x) {
    float4 m = fmax(fabs(x.lo), fabs(x.hi));
    return fmax(fmax(m.x, m.y), fmax(m.z, m.w));
}
