// Decode on NVIDIA (compute capability 8.0 and later): one token through the whole model in one launch. Sums of floats
// are in another order than the CPU's, so this is used only where the user allows that (`--gpu-fast`).
//
// A launch costs the host about 6 us, 81 of them 0.49 ms, more than reading the weights of a 1B model takes. So one
// work-group for each multiprocessor stays for the whole token, and a barrier over all of them (0.7 us) stands where
// the launches of gemv.cl end: qkv | attend | out | gate_up | down, five a layer. All groups are resident because there
// are no more of them than multiprocessors, and one group with its registers and local memory fits each.
//
// A warp takes eight rows (half a group of the packed layout) and four blocks at a time: lane bit 0 says which four
// rows, bits 1-2 the vector of the block, bits 3-4 the block. Groups own rows by turns that differ by at most one
// unit, so that no multiprocessor waits for another's second round. Weights depend on nothing, so the first of a step
// are asked for before the barrier that its activations come through.
//
// H200, Llama-3.2-1B shape, f16 cache, 64 slots: predicted 155 us for the weights at 4.4 TB/s and 80 us for barriers;
// measured 334 us, and 454 us with the logits in the host's memory. What costs the rest: a step's dependent reads
// (residual, activations) take 0.8 us each from the second-level cache. One query head an item instead of the four
// that share a KV head: 35 us less. No fence after the barrier's acquiring load, which would wait for the weights that
// are under way: 40 us less. Tried without gain: prefetches into the second-level cache (20 bytes a cycle is what a
// multiprocessor reads from it, hardly more than from DRAM); loads two steps ahead (registers spill); a warp of its own
// for the barrier (96 registers: spills).

#if !defined(GRID) || !defined(AT_QKV) || !defined(LAYER_BYTES) || !defined(LAYER_FLOATS) || !defined(AT_HEAD)
#error where the weights lie is not defined
#endif
#if WG != 512
#error a work-group is sixteen warps
#endif
#if DIM % 128 || Q_DIM % 128 || FFN_DIM % 128 || KV_BLOCK != 32
#error a warp takes four blocks at a time
#endif

// How a step's units are shared: a group takes EACH neighbouring ones; SPLIT warps share one, SWEEPS bites each.
#define EACH(rows) UP((rows) / 8, GRID)
#define FFN_EACH (UP(FFN_DIM / 32, GRID) * 4) // whole blocks of what `down` reads
#define SWEEPS(cols, split) ((cols) / 128 / (split))
#define OUT_EACH EACH(DIM)

// ---------------------------------------------------------------- attention

#define LANES (HEAD_DIM / 8)               // that share a row, eight elements each
#define AT_ONCE (WARPS * 32 / LANES)       // rows
#define SPAN (AT_ONCE * ROW_SWEEPS)       // slots of an item
#define PART (HEAD_DIM + 2)

// Eight elements of a row as stored.
typedef struct {
    uint4 a, b;
    float scale;
} Piece;

// First of the eight elements, and where the second four are: a byte of q4 holds elements z and z + 16.
#define FIRST(type, l) ((type) == T_Q4 ? (l) / 4 * 32 + (l) % 4 * 4 : (l) * 8)
#define SECOND(type) ((type) == T_Q4 ? 16 : 4)

Piece piece(int type, const __global uchar *row, uint l) {
    Piece p;
    p.scale = 1.0f;
    if (type == T_F32) {
        p.a = ((const __global uint4 *)row)[l * 2];
        p.b = ((const __global uint4 *)row)[l * 2 + 1];
    } else if (type == T_F16) {
        p.a = ((const __global uint4 *)row)[l];
    } else {
        const __global ushort *block = (const __global ushort *)(row + l / 4 * BLOCK_BYTES(type));
        p.scale = from_half(block[0]);
        if (type == T_Q8) {
            block += 1 + l % 4 * 4;
            p.a.x = block[0] | (uint)block[1] << 16;
            p.a.y = block[2] | (uint)block[3] << 16;
        } else {
            block += 1 + l % 4 * 2;
            p.a.x = block[0] | (uint)block[1] << 16;
        }
    }
    return p;
}

float8 elements(int type, Piece p) {
    if (type == T_F32) return (float8)(as_float4(p.a), as_float4(p.b));
    if (type == T_F16)
        return (float8)(two_halves(p.a.x), two_halves(p.a.y), two_halves(p.a.z), two_halves(p.a.w));
    if (type == T_Q8) return convert_float8(as_char8(p.a.xy)) * p.scale;
    char8 q = as_char8((uint2)(p.a.x & 0x0f0f0f0fu, (p.a.x >> 4) & 0x0f0f0f0fu));
    return (convert_float8(q) - 8.0f) * p.scale;
}

float8 of_row(int type, const __local float *x, uint l) {
    return (float8)(vload4(0, x + FIRST(type, l)), vload4(0, x + FIRST(type, l) + SECOND(type)));
}

float sum8(float8 v) {
    float4 s = v.lo + v.hi;
    return (s.x + s.y) + (s.z + s.w);
}

// ---------------------------------------------------------------- the token

// arena: matrices, layer by layer, then the head.
// floats: [layer][attn norm | ffn norm | qkv bias | o bias | q, k norm], then the final norm. state: kernels/common.cl. work: see below. sync: [0] arrivals, [1 + head] chunks done.
#define W_QKV 0
#define W_ATT_SCALES (W_QKV + QKV)
#define W_FFN_SCALES (W_ATT_SCALES + UP(Q_DIM / 32, 4) * 4)
#define W_ATT (W_FFN_SCALES + UP(FFN_DIM / 32, 4) * 4)
#define W_FFN (W_ATT + Q_DIM / 4)
#define W_ROWS (W_FFN + FFN_DIM / 4)                 // [head][key row | value row], as stored
#define ROW_FLOATS UP(HEAD_DIM * 2, 4) * 4
#define W_PARTS (W_ROWS + HEADS * ROW_FLOATS) // [head][chunk][HEAD_DIM | m | l]

__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void decode(
    const __global uchar *arena, const __global float *floats, const __global float *calibration,
    __global uchar *k_cache, __global uchar *v_cache, __global float *state, __global float *work,
    __global uint *sync, __global float *logits) {
    __local uint acts[WIDEST / 4];
    __local float act_scales[WIDEST / 32];
    __local float part[WIDER(WARPS * HEAD_DIM, PARTS)];
    __local float head[3 * HEAD_DIM]; // the head's query, the new key and value; gate_up's result
    __local float scores[WIDER(SPAN, FFN_EACH * 8)];
    __local float sums[WARPS];
    __local float2 row_scales[HEAD_DIM / KV_BLOCK];
    const uint lid = get_local_id(0), lane = lid % 32, warp = lid / 32, group = get_group_id(0);
    const __global int *header = (const __global int *)state;
    const uint slot = header[H_SLOT], capacity = header[H_CAPACITY], max_chunks = header[H_CHUNKS];
    __global float *x = ROW(state, 0);
    const __global float *angles = x + DIM;
    uint target = header[H_ARRIVALS];

    for (uint layer = 0; layer < LAYERS; layer++) {
        const __global uchar *w = arena + (size_t)layer * LAYER_BYTES;
        const __global float *f = floats + layer * LAYER_FLOATS;
        __global uchar *keys = k_cache + (size_t)layer * header[H_K_STRIDE] * 64;
        __global uchar *values = v_cache + (size_t)layer * header[H_V_STRIDE] * 64;

        // norm, qkv
        {
            enum { per = WARPS / QKV_SPLIT, rounds = UP(EACH(QKV), per), sweeps = SWEEPS(DIM, QKV_SPLIT) };
            const uint k = warp % QKV_SPLIT * sweeps * 4;
            Bite b[rounds][sweeps];
            for (uint r = 0; r < rounds; r++) {
                uint unit = min(group * EACH(QKV) + r * per + warp / QKV_SPLIT, (uint)QKV / 8 - 1);
                for (uint j = 0; j < sweeps; j++)
                    b[r][j] = bite(w + AT_QKV, w + AT_QKV_SCALES, unit, DIM / 32, k + j * 4);
            }
            // What came before, a launch for the first layer, has its barrier at the end of `down`.
            if (layer > 0) await(sync, &target, logits);
            norm(x, f + F_ATTN_NORM, acts, act_scales, sums);
            for (uint r = 0; r < rounds; r++) {
                float4 acc = 0.0f;
                for (uint j = 0; j < sweeps; j++) acc = chew(b[r][j], act_of(acts, act_scales, k + j * 4), acc);
                float y = fold(acc);
                uint at = ((r * per + warp / QKV_SPLIT) * 8 + folded_row()) * QKV_SPLIT + warp % QKV_SPLIT;
                if (lane < 8) part[at] = y;
            }
            barrier(CLK_LOCAL_MEM_FENCE);
            uint row = group * EACH(QKV) * 8 + lid;
            if (lid < EACH(QKV) * 8 && row < QKV) {
                float y = 0.0f;
                for (uint j = 0; j < QKV_SPLIT; j++) y += part[lid * QKV_SPLIT + j];
#if QKV_BIAS
                y += f[F_QKV_BIAS + row];
#endif
                work[W_QKV + row] = y;
            }
            arrive(sync);
        }

        // rope, attend: an item is one query head over one chunk of slots
        {
            const uint chunks = slot / SPAN + 1;
            const uint l = lane % LANES, sub = warp * (32 / LANES) + lane / LANES;
            bool waited = false;
            for (uint item = group; item < chunks * HEADS; item += GRID) {
                const uint h = item % HEADS, kv_head = h / GROUP, chunk = item / HEADS;
                const uint first = chunk * SPAN, count = min((uint)SPAN, slot + 1 - first);
                const __global uchar *k_rows = keys + ((size_t)kv_head * capacity + first) * K_ROW;
                const __global uchar *v_rows = values + ((size_t)kv_head * capacity + first) * V_ROW;
                Piece kp[ROW_SWEEPS], vp[ROW_SWEEPS];
                for (uint i = 0; i < ROW_SWEEPS; i++) {
                    uint s = min(i * AT_ONCE + sub, count - 1);
                    kp[i] = piece(K_TYPE, k_rows + s * K_ROW, l);
                    vp[i] = piece(V_TYPE, v_rows + s * V_ROW, l);
                }
                if (!waited) await(sync, &target, logits);
                waited = true;
                for (uint i = lid; i < 3 * HEAD_DIM; i += WG) {
                    uint at = i < HEAD_DIM ? h * HEAD_DIM + i
                              : i < 2 * HEAD_DIM ? Q_PAD + kv_head * HEAD_DIM + i - HEAD_DIM
                                                 : Q_PAD + KV_PAD + kv_head * HEAD_DIM + i - 2 * HEAD_DIM;
                    head[i] = fresh(work + W_QKV + at);
                }
                barrier(CLK_LOCAL_MEM_FENCE);
                const __global float *of_head = calibration + layer * LAYER_CALIBRATION + kv_head * CALIBRATION;
                ready_queries(head, f + F_QK_NORM, of_head, angles, 1, sums);
                if (slot < first + SPAN) {
                    // The chunk of the new row. One head of those that share it writes the cache, the others a copy.
                    ready_key(head + HEAD_DIM, f + F_QK_NORM + HEAD_DIM, of_head, angles, sums);
                    ready_value(head + 2 * HEAD_DIM);
                    __global uchar *copy = (__global uchar *)(work + W_ROWS + h * ROW_FLOATS);
                    __global uchar *k_row = h % GROUP == 0 ? keys + ((size_t)kv_head * capacity + slot) * K_ROW : copy;
                    __global uchar *v_row =
                        h % GROUP == 0 ? values + ((size_t)kv_head * capacity + slot) * V_ROW : copy + HEAD_DIM * 4;
                    store_row(K_TYPE, head + HEAD_DIM, k_row, row_scales, true);
                    store_row(V_TYPE, head + 2 * HEAD_DIM, v_row, row_scales, true);
                    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
                    for (uint i = 0; i < ROW_SWEEPS; i++) {
                        if (i * AT_ONCE + sub == slot - first) {
                            kp[i] = piece(K_TYPE, k_row, l);
                            vp[i] = piece(V_TYPE, v_row, l);
                        }
                    }
                }
                float8 q = of_row(K_TYPE, head, l);
                for (uint i = 0; i < ROW_SWEEPS; i++) {
                    float s = sum8(q * elements(K_TYPE, kp[i]));
                    for (uint m = 1; m < LANES; m *= 2) s += across(s, m);
                    uint at = i * AT_ONCE + sub;
                    if (l == 0) scores[at] = at < count ? s : LEAST;
                }
                barrier(CLK_LOCAL_MEM_FENCE);
                // Every warp for itself: largest score, sum of the weights.
                float most = LEAST, sum = 0.0f;
                for (uint i = lane; i < SPAN; i += 32) most = fmax(most, scores[i]);
                most = warp_max(most);
                for (uint i = lane; i < SPAN; i += 32) sum += i < count ? exp(scores[i] - most) : 0.0f;
                sum = warp_sum(sum);
                float8 acc = 0.0f;
                for (uint i = 0; i < ROW_SWEEPS; i++) {
                    uint at = i * AT_ONCE + sub;
                    acc += (at < count ? exp(scores[at] - most) : 0.0f) * elements(V_TYPE, vp[i]);
                }
                for (uint m = LANES; m < 32; m *= 2) {
                    acc.s0 += across(acc.s0, m), acc.s1 += across(acc.s1, m);
                    acc.s2 += across(acc.s2, m), acc.s3 += across(acc.s3, m);
                    acc.s4 += across(acc.s4, m), acc.s5 += across(acc.s5, m);
                    acc.s6 += across(acc.s6, m), acc.s7 += across(acc.s7, m);
                }
                if (lane < LANES) {
                    __local float *to = part + warp * HEAD_DIM + FIRST(V_TYPE, l);
                    vstore4(acc.lo, 0, to);
                    vstore4(acc.hi, 0, to + SECOND(V_TYPE));
                }
                barrier(CLK_LOCAL_MEM_FENCE);
                float y = 0.0f;
                if (lid < HEAD_DIM)
                    for (uint i = 0; i < WARPS; i++) y += part[i * HEAD_DIM + lid];
                bool whole = true;
                if (chunks > 1) {
                    __global float *parts = work + W_PARTS + (size_t)h * max_chunks * PART;
                    if (lid < HEAD_DIM) parts[chunk * PART + lid] = y;
                    if (lid == 0) {
                        parts[chunk * PART + HEAD_DIM] = most;
                        parts[chunk * PART + HEAD_DIM + 1] = sum;
                    }
                    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
                    if (lid == 0) {
                        // Back to zero with the last one.
                        uint before;
                        asm volatile("fence.acq_rel.gpu; atom.relaxed.gpu.global.inc.u32 %0, [%1], %2; "
                                     "fence.acq_rel.gpu;"
                                     : "=r"(before)
                                     : "l"(sync + 1 + h), "r"(chunks - 1)
                                     : "memory");
                        sums[0] = before == chunks - 1 ? 1.0f : 0.0f;
                    }
                    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
                    whole = sums[0] != 0.0f;
                    if (whole) {
                        // In ascending order, whoever is last.
                        most = LEAST, sum = 0.0f, y = 0.0f;
                        for (uint c = 0; c < chunks; c++) most = fmax(most, fresh(parts + c * PART + HEAD_DIM));
                        for (uint c = 0; c < chunks; c++) {
                            float scale = exp(fresh(parts + c * PART + HEAD_DIM) - most);
                            sum += scale * fresh(parts + c * PART + HEAD_DIM + 1);
                            if (lid < HEAD_DIM) y += scale * fresh(parts + c * PART + lid);
                        }
                    }
                }
                if (whole) {
                    if (lid < HEAD_DIM) head[lid] = y / sum;
                    barrier(CLK_LOCAL_MEM_FENCE);
#if V_ROTATED
                    rotate_heads(head, 1, true);
#endif
                    put_acts(head, HEAD_DIM / 4, work + W_ATT + h * (HEAD_DIM / 4),
                             work + W_ATT_SCALES + h * (HEAD_DIM / 32));
                }
                barrier(CLK_LOCAL_MEM_FENCE);
            }
            if (!waited) await(sync, &target, logits);
            arrive(sync);
        }

        // out
        {
            enum { per = WARPS / OUT_SPLIT, rounds = UP(OUT_EACH, per), sweeps = SWEEPS(Q_DIM, OUT_SPLIT) };
            const uint k = warp % OUT_SPLIT * sweeps * 4, row = group * OUT_EACH * 8 + lid;
            const bool mine = lid < OUT_EACH * 8 && row < DIM;
            Bite b[rounds][sweeps];
            for (uint r = 0; r < rounds; r++) {
                uint unit = min(group * OUT_EACH + r * per + warp / OUT_SPLIT, (uint)DIM / 8 - 1);
                for (uint j = 0; j < sweeps; j++)
                    b[r][j] = bite(w + AT_OUT, w + AT_OUT_SCALES, unit, Q_DIM / 32, k + j * 4);
            }
            float y = mine ? x[row] : 0.0f;
            await(sync, &target, logits);
            fetch(work + W_ATT, work + W_ATT_SCALES, Q_DIM, acts, act_scales);
            for (uint r = 0; r < rounds; r++) {
                float4 acc = 0.0f;
                for (uint j = 0; j < sweeps; j++) acc = chew(b[r][j], act_of(acts, act_scales, k + j * 4), acc);
                float sum = fold(acc);
                uint at = ((r * per + warp / OUT_SPLIT) * 8 + folded_row()) * OUT_SPLIT + warp % OUT_SPLIT;
                if (lane < 8) part[at] = sum;
            }
            barrier(CLK_LOCAL_MEM_FENCE);
            if (mine) {
                for (uint j = 0; j < OUT_SPLIT; j++) y += part[lid * OUT_SPLIT + j];
#if O_BIAS
                y += f[F_O_BIAS + row];
#endif
                x[row] = y;
            }
            arrive(sync);
        }

        // norm, gate_up: gate and up side by side
        {
            enum { per = WARPS / FFN_SPLIT, rounds = UP(FFN_EACH, per), sweeps = SWEEPS(DIM, FFN_SPLIT) };
            enum { depth = sweeps < 4 ? sweeps : 4 };
            const uint k = warp % FFN_SPLIT * sweeps * 4;
            const __global uchar *gate = w + AT_GATE_UP, *gate_scales = w + AT_GATE_UP_SCALES;
            const __global uchar *up = gate + (size_t)FFN_PAD * DIM / 2;
            const __global uchar *up_scales = gate_scales + (size_t)FFN_PAD * DIM / 16;
            for (uint r = 0; r < rounds; r++) {
                uint unit = min(group * FFN_EACH + r * per + warp / FFN_SPLIT, (uint)FFN_DIM / 8 - 1);
                Bite g[depth], u[depth];
                for (uint j = 0; j < depth; j++) {
                    g[j] = bite(gate, gate_scales, unit, DIM / 32, k + j * 4);
                    u[j] = bite(up, up_scales, unit, DIM / 32, k + j * 4);
                }
                if (r == 0) {
                    await(sync, &target, logits);
                    norm(x, f + F_FFN_NORM, acts, act_scales, sums);
                }
                float4 gate_acc = 0.0f, up_acc = 0.0f;
                for (uint first = 0; first < sweeps; first += depth) {
#pragma unroll
                    for (uint j = 0; j < depth; j++) {
                        if (first + j < sweeps) {
                            Act a = act_of(acts, act_scales, k + (first + j) * 4);
                            gate_acc = chew(g[j], a, gate_acc);
                            up_acc = chew(u[j], a, up_acc);
                        }
                        if (first + j + depth < sweeps) {
                            g[j] = bite(gate, gate_scales, unit, DIM / 32, k + (first + j + depth) * 4);
                            u[j] = bite(up, up_scales, unit, DIM / 32, k + (first + j + depth) * 4);
                        }
                    }
                }
                float gate_sum = fold(gate_acc), up_sum = fold(up_acc);
                if (lane < 8) {
                    uint at = ((r * per + warp / FFN_SPLIT) * 8 + folded_row()) * (2 * FFN_SPLIT) + warp % FFN_SPLIT;
                    part[at] = gate_sum;
                    part[at + FFN_SPLIT] = up_sum;
                }
            }
            barrier(CLK_LOCAL_MEM_FENCE);
            for (uint i = lid; i < FFN_EACH * 8; i += WG) {
                float g = 0.0f, u = 0.0f;
                for (uint j = 0; j < FFN_SPLIT; j++) {
                    g += part[i * (2 * FFN_SPLIT) + j];
                    u += part[i * (2 * FFN_SPLIT) + FFN_SPLIT + j];
                }
                scores[i] = g / (1.0f + exp(-g)) * u;
            }
            barrier(CLK_LOCAL_MEM_FENCE);
            uint first = group * FFN_EACH * 8;
            uint items = first < FFN_DIM ? min((uint)FFN_EACH * 8, FFN_DIM - first) / 4 : 0;
            put_acts(scores, items, work + W_FFN + first / 4, work + W_FFN_SCALES + first / 32);
            arrive(sync);
        }

        // down
        {
            enum { per = WARPS / DOWN_SPLIT, rounds = UP(OUT_EACH, per), sweeps = SWEEPS(FFN_DIM, DOWN_SPLIT) };
            enum { depth = sweeps < 8 ? sweeps : 8 };
            const uint k = warp % DOWN_SPLIT * sweeps * 4, row = group * OUT_EACH * 8 + lid;
            const bool mine = lid < OUT_EACH * 8 && row < DIM;
            float y = mine ? x[row] : 0.0f;
            for (uint r = 0; r < rounds; r++) {
                uint unit = min(group * OUT_EACH + r * per + warp / DOWN_SPLIT, (uint)DIM / 8 - 1);
                Bite b[depth];
                for (uint j = 0; j < depth; j++)
                    b[j] = bite(w + AT_DOWN, w + AT_DOWN_SCALES, unit, FFN_DIM / 32, k + j * 4);
                if (r == 0) {
                    await(sync, &target, logits);
                    fetch(work + W_FFN, work + W_FFN_SCALES, FFN_DIM, acts, act_scales);
                }
                float4 acc = 0.0f;
                for (uint first = 0; first < sweeps; first += depth) {
#pragma unroll
                    for (uint j = 0; j < depth; j++) {
                        uint block = k + (first + j) * 4;
                        if (first + j < sweeps) acc = chew(b[j], act_of(acts, act_scales, block), acc);
                        if (first + j + depth < sweeps)
                            b[j] = bite(w + AT_DOWN, w + AT_DOWN_SCALES, unit, FFN_DIM / 32, block + depth * 4);
                    }
                }
                float sum = fold(acc);
                uint at = ((r * per + warp / DOWN_SPLIT) * 8 + folded_row()) * DOWN_SPLIT + warp % DOWN_SPLIT;
                if (lane < 8) part[at] = sum;
            }
            barrier(CLK_LOCAL_MEM_FENCE);
            if (mine) {
                for (uint j = 0; j < DOWN_SPLIT; j++) y += part[lid * DOWN_SPLIT + j];
                x[row] = y;
            }
            arrive(sync);
        }
    }

    // norm, head: a unit a warp
    enum { sweeps = DIM / 128, depth = sweeps < 8 ? sweeps : 8 };
    const uint end = min((group + 1) * EACH(HEAD_ROWS), (uint)HEAD_ROWS / 8);
    const __global uchar *quants = arena + AT_HEAD, *scales = arena + AT_HEAD_SCALES;
    uint unit = group * EACH(HEAD_ROWS) + warp;
    Bite b[depth];
    for (uint j = 0; j < depth; j++) b[j] = bite(quants, scales, min(unit, (uint)HEAD_ROWS / 8 - 1), DIM / 32, j * 4);
    await(sync, &target, logits);
    norm(x, floats + LAYERS * LAYER_FLOATS, acts, act_scales, sums);
    for (; unit < end; unit += WARPS) {
        uint next = min(unit + WARPS, (uint)HEAD_ROWS / 8 - 1);
        float4 acc = 0.0f;
        for (uint first = 0; first < sweeps; first += depth) {
#pragma unroll
            for (uint j = 0; j < depth; j++) {
                if (first + j >= sweeps) continue;
                acc = chew(b[j], act_of(acts, act_scales, (first + j) * 4), acc);
                // The next of this unit, or of the next one.
                bool over = first + j + depth >= sweeps;
                b[j] = bite(quants, scales, over ? next : unit, DIM / 32, (over ? j : first + j + depth) * 4);
            }
        }
        float y = fold(acc);
        uint row = unit * 8 + folded_row();
        if (lane < 8 && row < VOCAB) logits[row] = y;
    }
}
