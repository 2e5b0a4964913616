// Decode of several sequences on NVIDIA (compute capability 8.0 and later): one token of each through the whole model
// in one launch, bit-exact with the CPU.
//
// As in decode.cl, a work-group per multiprocessor stays for all steps and computes whole rows. The results of a step
// are in global memory, and all work-groups meet at a barrier after each step: norm | qkv | attend | merge | out | norm
// | gate_up | down. Weights are read once for all tokens: a work-group copies them and the tokens' activations to local
// memory in the background, and each of its warps multiplies half a unit, or a whole one, with sixteen tokens on the
// integer tensor cores. Sums of blocks are added in ascending order where they are computed.
//
// H200, Llama-3.2-1B shape, f16 cache, 16 tokens: 0.9 ms, of which gate_up takes 18 %, down 20, the head 8, attend and
// merge 11, norms 8, qkv and out 14, and barriers 21. Tried without gain: weights or activations already in the L2
// cache or in another layout, bulk copies instead of 16-byte ones, warps that only copy, requesting a step's first
// weights before the barrier, merging a token's only chunk in attention.

#if !defined(GRID) || !defined(AT_QKV) || !defined(LAYER_BYTES) || !defined(LAYER_FLOATS) || !defined(AT_HEAD)
#error where the weights lie is not defined
#endif
#ifndef POOL
#error the local memory in which weights arrive is not defined
#endif
#if DIM % 64 || Q_DIM % 64 || FFN_DIM % 64 || KV_BLOCK != 32 || SEVERAL != 16
#error a warp takes pairs of blocks of 32, and sixteen tokens
#endif

// The bits of 1.5 * 2^23: the float of that and a small integer is a subtraction away from the integer's float.
#define MAGIC_FLOAT 0x4b400000
// Words of a block of activations for all tokens, and of all activations of a step.
#define BLOCK_WORDS (SEVERAL * 8)
#define ACT_WORDS(cols) ((cols) / 32 * BLOCK_WORDS)

// Argument of the launch. `earlier_arrivals`: arrivals at barriers in earlier launches.
typedef struct {
    Runs runs;
    int2 strides[SEVERAL]; // from one layer's keys (values) to the next, in 64 bytes
    int tokens;
    uint earlier_arrivals;
    int unused[2];
} Batch;

// ---------------------------------------------------------------- barrier

uint load_relaxed(const __global uint *from) {
    uint x;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}

// Barrier of all work-groups, after which all see what was written before. Gives up on a work-group that never arrives.
void grid_barrier(__global uint *sync, uint goal) {
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    if (get_local_id(0) == 0) {
        asm volatile("fence.acq_rel.gpu; red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(sync) : "memory");
#pragma unroll 1
        for (uint poll_count = 1; (int)(load_relaxed(sync) - goal) < 0; poll_count++) {
            if (poll_count % 1024 == 0 && (poll_count >= MAX_POLLS || load_relaxed(sync + 1))) {
                asm volatile("st.relaxed.gpu.global.u32 [%0], 1;" ::"l"(sync + 1) : "memory");
                break;
            }
        }
        asm volatile("fence.acq_rel.gpu;" ::: "memory");
    }
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
}

// ---------------------------------------------------------------- activations

// Activations of a step, in the order in which a lane reads them: [block][token % 8][word % 4][word / 4][token / 8],
// and their scales: [block][token % 8][token / 8].
typedef struct {
    __global uint *words;
    __global float *scales;
} BatchActivations;

// Stores a block of one token, one element per lane of a warp.
void store_activations(float y, uint token, uint block, BatchActivations to) {
    const uint lane = get_local_id(0) % 32, k = lane / 4;
    float2 scale = activation_scale(warp_max(fabs(y)));
    uint word = (uint)as_uchar(convert_char(rint(y * scale.y))) << lane % 4 * 8;
    word |= shuffle_from(word, lane ^ 1);
    word |= shuffle_from(word, lane ^ 2);
    if (lane % 4 == 0) to.words[block * BLOCK_WORDS + token % 8 * 16 + k % 4 * 4 + k / 4 * 2 + token / 8] = word;
    if (lane == 0) to.scales[block * SEVERAL + token % 8 * 2 + token / 8] = scale.x;
}

// RMS norm of the residual: one work-group per token. `x` has NORM_FLOATS.
#define NORM_FLOATS (DIM + 16 * PREFETCH_MARGIN + 16)
void norm_tokens(const __global float *state, const __global float *w, uint tokens, BatchActivations to,
                 __local float *x) {
    const uint lid = get_local_id(0);
    __local float *red = x + DIM + 16 * PREFETCH_MARGIN;
    for (uint token = get_group_id(0); token < tokens; token += GRID) {
        const __global float *from = ROW(state, token);
        float weights[CEIL_DIV(DIM, ITEMS)];
        for (uint i = 0; i < CEIL_DIV(DIM, ITEMS); i++) weights[i] = w[min(i * ITEMS + lid, (uint)DIM - 1)];
        barrier(CLK_LOCAL_MEM_FENCE);
        for (uint i = lid; i < DIM; i += ITEMS) x[i] = from[i];
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lid < 16) red[lid] = sum_squares(x);
        barrier(CLK_LOCAL_MEM_FENCE);
        float scale = divide(1.0f, sqrt_rn(divide(sum_lanes(red), (float)DIM) + NORM_EPS));
        for (uint i = 0; i < CEIL_DIV(DIM, ITEMS); i++) {
            const uint at = i * ITEMS + lid;
            if (at < DIM) store_activations(x[at] * scale * weights[i], token, at / 32, to);
        }
    }
}

// ---------------------------------------------------------------- products

// A work-group copies its inputs to local memory in stages, each some blocks of its units and of all tokens, used in
// turn as a ring.
#define STAGES 4
#define STAGE_BYTES(units, blocks) ((blocks) * ((units) * 288 + BLOCK_WORDS * 4 + SEVERAL * 4))
// Units of a work-group multiplied at once, if `count` units are distributed.
#define UNITS_OF(count) MIN_OF(WARPS / 2, CEIL_DIV(count, GRID))
#define STAGES_FIT(units, all, blocks) ((all) % (blocks) == 0 && STAGES * STAGE_BYTES(units, blocks) <= POOL)
#define BLOCKS_OF(units, all) (STAGES_FIT(units, all, 8) ? 8 : STAGES_FIT(units, all, 4) ? 4 : 2)

// A matrix and its input. If `paired`, two units of gate are followed by two of up.
typedef struct {
    const __global uchar *quants, *scales;
    uint first, last; // units, or pairs
    bool paired;
    BatchActivations in;
} Step;

uint unit_of(Step s, uint i) {
    if (!s.paired) return min(s.first + i, s.last);
    return min(s.first + i / 4, s.last) * 2 + i % 2 + i / 2 % 2 * (FFN_PAD / 16);
}

// Part of a stage copied by one work-item: sixteen bytes, at a distance of `step` in the next stage.
typedef struct {
    const __global uchar *from;
    uint to, step;
} Portion;
#define PORTIONS(units, blocks) ((units) * (blocks) * 18 + (blocks) * (BLOCK_WORDS + SEVERAL) / 4)

// Portion i of a stage: quants, then their scales, then activations, then their scales.
Portion portion_of(Step s, const uint units, const uint blocks, const uint all, uint i) {
    const uint quants = units * blocks * 16, scales = quants + units * blocks * 2, acts = scales + blocks * BLOCK_WORDS / 4;
    Portion p;
    p.to = i * 16;
    if (i < quants) {
        const uint at = i % (blocks * 16);
        p.from = s.quants + (size_t)unit_of(s, i / (blocks * 16)) * all * 256 + at * 16;
        p.step = blocks * 256;
    } else if (i < scales) {
        const uint at = i - quants;
        p.from = s.scales + (size_t)unit_of(s, at / (blocks * 2)) * all * 32 + at % (blocks * 2) * 16;
        p.step = blocks * 32;
    } else if (i < acts) {
        p.from = (const __global uchar *)s.in.words + (i - scales) * 16;
        p.step = blocks * BLOCK_WORDS * 4;
    } else {
        p.from = (const __global uchar *)s.in.scales + (i - acts) * 16;
        p.step = blocks * SEVERAL * 4;
    }
    return p;
}

void copy_async(Portion *p, uint number, __local uchar *stage) {
    for (uint i = 0; i < 2; i++) {
        if (i * ITEMS + get_local_id(0) < number)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"l"(stage + p[i].to), "l"(p[i].from) : "memory");
        p[i].from += p[i].step;
    }
}

// Sums of `halves` halves of a unit with all tokens, for warps that have one: lane 4 r + v holds rows 4 v and 4 v + 2
// of the first half (one row further for the second) with token r, and then with token r + 8.
void multiply_units(float *acc, Step s, const uint units, const uint halves, const uint blocks, const uint all,
              __local uchar *ring) {
    const uint lane = get_local_id(0) % 32, warp = get_local_id(0) / 32, row = lane / 4, vector = lane % 4;
    const uint unit = warp * halves / 2, half_of = warp * halves % 2, rounds = all / blocks;
    const uint portions = PORTIONS(units, blocks), bytes = STAGE_BYTES(units, blocks);
    Portion mine[2];
    for (uint i = 0; i < 2; i++) mine[i] = portion_of(s, units, blocks, all, i * ITEMS + get_local_id(0));
    for (uint i = 0; i < 4 * halves; i++) acc[i] = 0.0f;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint r = 0; r < STAGES - 1; r++) {
        if (r < rounds) copy_async(mine, portions, ring + r * bytes);
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
#pragma unroll 1
    for (uint r = 0; r < rounds; r++) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
        barrier(CLK_LOCAL_MEM_FENCE);
        if (r + STAGES - 1 < rounds) copy_async(mine, portions, ring + (r + STAGES - 1) % STAGES * bytes);
        asm volatile("cp.async.commit_group;" ::: "memory");
        const __local uchar *stage = ring + r % STAGES * bytes;
        if (unit < units) {
            const __local uchar *quants = stage + unit * blocks * 256 + vector * 64 + row * 8 + half_of * 4;
            const __local uchar *scales = stage + units * blocks * 256 + unit * blocks * 32 + vector * 8;
            const __local uchar *acts = stage + units * blocks * 288 + lane * 16;
            const __local uchar *act_scales = stage + units * blocks * 288 + blocks * (BLOCK_WORDS * 4) + row * 8;
#pragma unroll
            for (uint k = 0; k < 8; k++) {
                if (k >= blocks) continue;
                uint2 w;
                if (halves == 2)
                    w = *(const __local uint2 *)(quants + k * 256);
                else
                    w.x = *(const __local uint *)(quants + k * 256);
                uint2 d = *(const __local uint2 *)(scales + k * 32);
                if (halves == 1 && half_of) d >>= 16;
                const uint4 a = *(const __local uint4 *)(acts + k * (BLOCK_WORDS * 4));
                const float2 by = *(const __local float2 *)(act_scales + k * (SEVERAL * 4));
#pragma unroll
                for (uint h = 0; h < 2; h++) {
                    if (h >= halves) continue;
                    // A nibble in the upper half of a byte, with its highest bit flipped, is sixteen times its weight,
                    // signed. The sum is added to the bits of 1.5 * 2^23, which makes it a float.
                    const uint words = h ? w.y : w.x;
                    const uint low = ((words << 4) & 0xf0f0f0f0u) ^ 0x80808080u, high = (words & 0xf0f0f0f0u) ^ 0x80808080u;
                    const float d0 = h ? unpack_halves(d.x).y : unpack_halves(d.x).x, d1 = h ? unpack_halves(d.y).y : unpack_halves(d.y).x;
                    int c[4];
                    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
                        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
                        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(low), "r"(high), "r"(MAGIC_FLOAT));
                    for (uint i = 0; i < 4; i++) {
                        const float whole = fma(as_float(c[i]), 0.0625f, -786432.0f);
                        acc[h * 4 + i] = fma(whole, (i % 2 ? d1 : d0) * (i / 2 ? by.y : by.x), acc[h * 4 + i]);
                    }
                }
            }
        }
    }
}

// Loop over those of `count` units, or pairs, that belong to the work-group: the first unit of each iteration, `each`
// apart.
#define FOR_BATCHES(count, each)                                                                        \
    for (uint end = min((group + 1) * CEIL_DIV(count, GRID), (uint)(count)), first = group * CEIL_DIV(count, GRID); \
         first < end; first += (each))
// Loop over the sums of a lane, with their rows and tokens.
#define FOR_SUMS(row, token)                                                                            \
    for (uint i = 0; i < 4 * halves; i++)                                                               \
        for (uint unit = first + warp * halves / 2, token = lane / 4 + i / 2 % 2 * 8,                   \
                  row = unit * 16 + lane % 4 * 4 + i % 2 * 2 + (halves == 2 ? i / 4 : warp % 2);        \
             warp * halves < 2 * each && unit < end && token < tokens; token = tokens)

// ---------------------------------------------------------------- attention

// End of a token's attention: one team per head.
void merge_head(const __global float *partials, const __global float *ml, uint chunks, uint head, uint token,
                __local float *out, BatchActivations to) {
    const uint lid = team_item();
    team_barrier();
    for (uint d = lid; d < HEAD_DIM; d += TEAM) out[d] = merge_element(partials, ml, chunks, head, d);
    team_barrier();
#if V_ROTATED
    rotate_heads(out, 1, true);
#endif
    for (uint d = lid; d < HEAD_DIM; d += TEAM)
        store_activations(out[d], token, (head * HEAD_DIM + d) / 32, to);
}

// ---------------------------------------------------------------- tokens

// Address of each token's logits, in host memory.
#define LOGITS(i) __global float *logits_##i
#define TO(i) \
    if (warp == i) to = logits_##i;

// arena, floats: see decode.cl. state: kernels/common.cl. acts: of the widest step, then of `down`. sync: number of
// arrivals at barriers, and a flag for a work-group that was given up.
__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void decode_batch(
    const __global uchar *arena, const __global float *floats, const __global float *calibration,
    __global float *state, __global float *qkv, __global float *partials, __global float *ml, __global uint *acts,
    __global uint *sync, ALL_CACHES, FOR_ALL_RUNS(LOGITS), Batch batch) {
    __local uint4 pool[MAX_OF(POOL / 16, CEIL_DIV(MAX_OF(TEAMS_PER_GROUP * TEAM_FLOATS, NORM_FLOATS), 4))];
    __local float *local_floats = (__local float *)pool;
    const uint lid = get_local_id(0), group = get_group_id(0), warp = lid / 32, lane = lid % 32, team = lid / TEAM;
    const uint tokens = batch.tokens;
    const BatchActivations in = {acts, (__global float *)(acts + ACT_WORDS(MAX_OF(DIM, Q_DIM)))};
    __global uint *behind = acts + ACT_WORDS(MAX_OF(DIM, Q_DIM)) / 8 * 9;
    const BatchActivations ffn = {behind, (__global float *)(behind + ACT_WORDS(FFN_DIM))};
    uint goal = batch.earlier_arrivals;
// Product of the units of one iteration with all tokens.
#define MULTIPLY_UNITS(quants, scales, cols, from, paired)                                                    \
    const Step step = {quants, scales, first, end - 1, paired, from};                                   \
    float acc[4 * halves];                                                                              \
    multiply_units(acc, step, each, halves, BLOCKS_OF(each, (cols) / 32), (cols) / 32, (__local uchar *)pool);
// Units of gate and up.
#define FFN_UNITS MIN_OF(WARPS / 2, 4 * CEIL_DIV(FFN_DIM / 32, GRID))
#define GRID_BARRIER grid_barrier(sync, goal += GRID)

    for (uint layer = 0; layer < LAYERS; layer++) {
        const __global uchar *w = arena + (size_t)layer * LAYER_BYTES;
        const __global float *f = floats + layer * LAYER_FLOATS;
        // norm, qkv
        norm_tokens(state, f + F_ATTN_NORM, tokens, in, local_floats);
        GRID_BARRIER;
        FOR_BATCHES(QKV / 16, UNITS_OF(QKV / 16)) {
            enum { each = UNITS_OF(QKV / 16), halves = 1 };
            MULTIPLY_UNITS(w + AT_QKV, w + AT_QKV_SCALES, DIM, in, false)
            FOR_SUMS(row, token) {
                float y = acc[i];
#if QKV_BIAS
                y += f[F_QKV_BIAS + row];
#endif
                qkv[(size_t)token * QKV + row] = y;
            }
        }
        GRID_BARRIER;

        // rope, attend: one team per chunk and KV head
        for (uint item = group + team * GRID; item < (uint)batch.runs.first_chunk[SEVERAL] * KV_HEADS;
             item += TEAMS_PER_GROUP * GRID) {
            const int kv_head = item % KV_HEADS, chunk = item / KV_HEADS;
            int of = 0;
            while (of + 1 < (int)tokens && chunk >= batch.runs.first_chunk[of + 1]) of++;
            __global uchar *k_cache = k_0, *v_cache = v_0;
            SELECT_CACHE
            const size_t first = batch.runs.first_chunk[of];
            k_cache += (size_t)layer * batch.strides[of].x * 64;
            v_cache += (size_t)layer * batch.strides[of].y * 64;
            attend_one(state, qkv, f + F_QK_NORM, calibration + layer * LAYER_CALIBRATION, k_cache, v_cache,
                       partials + first * (HEADS * HEAD_DIM), ml + first * (HEADS * 2), batch.runs.of[of], kv_head,
                       chunk - (int)first, local_floats + team * TEAM_FLOATS);
            team_barrier();
        }
        GRID_BARRIER;
        for (uint item = group + team * GRID; item < tokens * HEADS; item += TEAMS_PER_GROUP * GRID) {
            const uint token = item / HEADS, head = item % HEADS, first = batch.runs.first_chunk[token];
            merge_head(partials + (size_t)first * (HEADS * HEAD_DIM), ml + (size_t)first * (HEADS * 2),
                       batch.runs.first_chunk[token + 1] - first, head, token, local_floats + team * TEAM_FLOATS, in);
        }
        GRID_BARRIER;

        // out, down: added to the residual
#define ADD_TO_RESIDUAL(at, at_scales, cols, from, bias)                             \
    FOR_BATCHES(DIM / 16, UNITS_OF(DIM / 16)) {                            \
        enum { each = UNITS_OF(DIM / 16), halves = 1 };                    \
        MULTIPLY_UNITS(w + (at), w + (at_scales), cols, from, false)            \
        FOR_SUMS(row, token) {                                            \
            float y = acc[i];                                             \
            bias;                                                         \
            __global float *x = ROW(state, token) + row;                  \
            *x = *x + y;                                                  \
        }                                                                 \
    }                                                                     \
    GRID_BARRIER
#if O_BIAS
        ADD_TO_RESIDUAL(AT_OUT, AT_OUT_SCALES, Q_DIM, in, y += f[F_O_BIAS + row]);
#else
        ADD_TO_RESIDUAL(AT_OUT, AT_OUT_SCALES, Q_DIM, in, );
#endif

        // norm, gate_up
        norm_tokens(state, f + F_FFN_NORM, tokens, in, local_floats);
        GRID_BARRIER;
        FOR_BATCHES(FFN_DIM / 32, CEIL_DIV(FFN_UNITS, 4)) {
            enum { each = FFN_UNITS, halves = 2 };
            MULTIPLY_UNITS(w + AT_GATE_UP, w + AT_GATE_UP_SCALES, DIM, in, true)
            barrier(CLK_LOCAL_MEM_FENCE);
            // [block][gate, up][token][row]
            __local float *sums = local_floats;
            if (warp < each)
                for (uint i = 0; i < 8; i++)
                    sums[(warp / 2 * SEVERAL + lane / 4 + i / 2 % 2 * 8) * 33 + warp % 2 * 16 + lane % 4 * 4 + i % 2 * 2 + i / 4] =
                        acc[i];
            barrier(CLK_LOCAL_MEM_FENCE);
            for (uint i = warp; i < each / 4 * tokens; i += WARPS) {
                const uint block = i / tokens, token = i % tokens;
                if (first + block >= end) continue;
                const __local float *gate = sums + (block * 2 * SEVERAL + token) * 33 + lane;
                store_activations(silu(gate[0]) * gate[SEVERAL * 33], token, first + block, ffn);
            }
        }
        GRID_BARRIER;
        ADD_TO_RESIDUAL(AT_DOWN, AT_DOWN_SCALES, FFN_DIM, ffn, );
    }

    // norm, head
    norm_tokens(state, floats + LAYERS * LAYER_FLOATS, tokens, in, local_floats);
    GRID_BARRIER;
    const bool lost = load_relaxed(sync + 1) != 0;
    const __global uchar *w = arena;
    FOR_BATCHES(HEAD_ROWS / 16, UNITS_OF(HEAD_ROWS / 16)) {
        enum { each = UNITS_OF(HEAD_ROWS / 16), halves = 2, stride = each * 16 + 1 };
        MULTIPLY_UNITS(w + AT_HEAD, w + AT_HEAD_SCALES, DIM, in, false)
        // [token][row], so that adjacent values go to the host together: one warp per token.
        barrier(CLK_LOCAL_MEM_FENCE);
        FOR_SUMS(row, token) local_floats[token * stride + row - first * 16] = acc[i];
        barrier(CLK_LOCAL_MEM_FENCE);
        __global float *to = logits_0;
        FOR_OTHER_RUNS(TO)
        const uint rows = min(min(first + each, end) * 16, (uint)VOCAB) - first * 16;
        for (uint row = lane; row < rows && warp < tokens; row += 32)
            to[first * 16 + row] = lost && first + row == 0 ? NAN : local_floats[warp * stride + row];
    }
}
