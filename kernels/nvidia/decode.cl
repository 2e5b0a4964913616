// Decode on NVIDIA (compute capability 8.0 and later): one token through the whole model in one launch, bit-exact with
// the CPU.
//
// A launch costs the host about 6 us; 81 launches take 0.49 ms, more than reading the weights of a 1B model. So one
// work-group per multiprocessor stays for the whole token. Steps pass on their results in slots that carry their own
// tag of completion (header.cl): qkv | attend | out | gate_up | down. All work-groups are resident: there are no more
// of them than multiprocessors, and each multiprocessor has registers and local memory for one.
//
// A work-group computes whole rows, so no sum crosses work-groups. Its warps compute the exact integer sums of blocks,
// in any order, on the tensor cores. The sums wait in local memory until one work-item per row adds them in the
// specified order. Weights depend on nothing, so the first weights of a step are requested before waiting for its
// input.
//
// H200, Llama-3.2-1B shape, f16 cache: about 400 us per token; reading the weights alone would take 160. Of the 46,000
// cycles of a layer, attention takes 10,000, qkv 6,700, out 4,200, gate_up 15,700 and down 9,000; only the head reads
// at memory speed. With slots instead of a counter and fences, an exchange costs 0.6 us. Loading too far ahead blocks
// local memory: four fragments per warp are as fast as eight. Work of a single work-item is expensive: a chain of sums
// with computed addresses took 14 cycles per step, which costs 8 % of the token.

#if !defined(GRID) || !defined(AT_QKV) || !defined(LAYER_BYTES) || !defined(LAYER_FLOATS) || !defined(AT_HEAD)
#error where the weights lie is not defined
#endif
#if WG != 512
#error a work-group is sixteen warps
#endif
#if DIM % 64 || Q_DIM % 64 || FFN_DIM % 64 || KV_BLOCK != 32
#error a warp takes two blocks at a time
#endif

// Distribution of a step's units: a work-group takes UNITS_PER_GROUP adjacent ones, UNITS_PER_ROUND per round, of which
// a warp takes FRAGMENTS_PER_WARP fragments.
#define UNITS_PER_GROUP(rows) CEIL_DIV((rows) / 16, GRID)
#define FRAGMENTS_PER_WARP(units, cols) CEIL_DIV((units) * (cols) / 64, WARPS)
#define HAS_FLOATS(cols) (UNITS_AS_FLOATS((cols) / 32) > 0)
#define UNITS_PER_ROUND(rows, cols) MIN_OF(UNITS_PER_GROUP(rows), HAS_FLOATS(cols) ? UNITS_AS_FLOATS((cols) / 32) : UNITS_AS_HALVES((cols) / 32))
// For gate_up: whole blocks of what `down` reads.
#define FFN_BLOCKS_PER_GROUP CEIL_DIV(FFN_DIM / 32, GRID)
#define FFN_BLOCKS_PER_ROUND MIN_OF(FFN_BLOCKS_PER_GROUP, UNITS_AS_HALVES(DIM / 32) / 4)
#define OUT_UNITS_PER_GROUP UNITS_PER_GROUP(DIM)

// Requests the first weights of a round, after `done` units of the work-group: as soon as registers are free, and when
// no awaited answer would queue behind them.
#define LOAD_FIRST(into, w, at, at_scales, rows, cols, done)                                                  \
    {                                                                                                    \
        const int left = min((int)UNITS_PER_GROUP(rows), (rows) / 16 - (int)(group * UNITS_PER_GROUP(rows))) - (done);         \
        Units request = units_from((w) + (at), (w) + (at_scales), (group * UNITS_PER_GROUP(rows) + (done)) * ((cols) / 64), ~0u, 0); \
        if (left > 0)                                                                                    \
            load_fragments(into, request, FRAGMENTS_PER_WARP(UNITS_PER_ROUND(rows, cols), cols),                              \
                  min((int)UNITS_PER_ROUND(rows, cols), left) * ((cols) / 64));                                  \
    }
#define LOAD_FIRST_OF_HEAD                                                                                           \
    {                                                                                                        \
        const int left = min((int)UNITS_PER_GROUP(HEAD_ROWS), HEAD_ROWS / 16 - (int)(group * UNITS_PER_GROUP(HEAD_ROWS)));         \
        Units request = units_from(arena + AT_HEAD, arena + AT_HEAD_SCALES, group * UNITS_PER_GROUP(HEAD_ROWS) * (DIM / 64), ~0u, 0);              \
        if (left > 0) load_fragments(c, request, FRAGMENTS_PER_WARP(HEAD_UNITS_PER_ROUND, DIM), left * (DIM / 64));                  \
    }
// `now` blocks of rows from `first` on, of gate and then of up.
#define GATE_UP(first, now)                                                                                     \
    units_from(w + AT_GATE_UP, w + AT_GATE_UP_SCALES, (first) * 2 * (DIM / 64), (now) * 2 * (DIM / 64),           \
             (FFN_PAD / 16 - (now) * 2) * (DIM / 64))
#define LOAD_FIRST_OF_GATE_UP(done)                                                                                     \
    {                                                                                                           \
        const int left = min((int)FFN_BLOCKS_PER_GROUP, FFN_DIM / 32 - (int)(group * FFN_BLOCKS_PER_GROUP)) - (done);                   \
        const int now = min((int)FFN_BLOCKS_PER_ROUND, left);                                                            \
        Units request = GATE_UP(group * FFN_BLOCKS_PER_GROUP + (done), now);                                                                   \
        if (left > 0) load_fragments(c, request, FRAGMENTS_PER_WARP(4 * FFN_BLOCKS_PER_ROUND, DIM), now * 4 * (DIM / 64));               \
    }

// ---------------------------------------------------------------- token

// arena: matrices, layer by layer, then the head
// floats: [layer][attn norm | ffn norm | qkv bias | o bias | q, k norm], then the final norm
// state: kernels/common.cl. work: see below, in slots. sync: set if a work-group was given up
#define W_QKV 0
#define W_ATT (W_QKV + QKV / 16 * SLOTS_PER_UNIT)
#define W_OUT (W_ATT + Q_DIM / 32 * SLOTS_PER_BLOCK)   // the residual after attention
#define W_FFN (W_OUT + DIM / 16 * SLOTS_PER_UNIT)
#define W_DOWN (W_FFN + FFN_DIM / 32 * SLOTS_PER_BLOCK) // the residual after a layer
#define W_PARTS (W_DOWN + DIM / 16 * SLOTS_PER_UNIT)   // [head][chunk][SLOTS_PER_PART]

// Local memory of attention, shared with the activations of other steps.
#define HEAD_FLOATS ((GROUP + 2) * HEAD_DIM)
#define ATTEND_FLOATS (HEAD_FLOATS + GROUP * CHUNK)

__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void decode(
    const __global uchar *arena, const __global float *floats, const __global float *calibration,
    __global uchar *k_cache, __global uchar *v_cache, const __global float *state, __global Slot *work,
    __global uint *sync, __global float *logits) {
    __local uint4 parts4[CEIL_DIV(PARTS + PREFETCH_MARGIN, 4)];
    __local uint4 acts4[CEIL_DIV(MAX_OF(MAX_COLS / 4, ATTEND_FLOATS), 4)];
    __local float act_scales[MAX_COLS / 32 + PREFETCH_MARGIN];
    __local float residual[OUT_UNITS_PER_GROUP * 16];
    __local float red[MAX_OF(FFN_BLOCKS_PER_ROUND * 64, (GROUP + 2) * 16)];
    __local float2 row_scales[2 * ROW_BLOCKS * CANDIDATES], weights[64];
    __local uint *parts = (__local uint *)parts4, *acts = (__local uint *)acts4;
    __local float *rows = (__local float *)parts4;
    const uint lid = get_local_id(0), warp = lid / 32, group = get_group_id(0);
    const __global int *header = (const __global int *)state;
    const uint slot = header[H_SLOT], capacity = header[H_CAPACITY], max_chunks = header[H_CHUNKS];
    const uint chunks = slot / CHUNK + 1;
    const __global float *x = ROW(state, 0), *angles = x + DIM;
    uint tag = header[H_STEPS];
    // Upper halves of bytes, hidden from the compiler so that the value stays in a register.
    __local uint hidden_masks[32];
    if (lid < 32) hidden_masks[lid] = 0xf0f0f0f0u;
    barrier(CLK_LOCAL_MEM_FENCE);
    const uint mask = *(volatile __local uint *)(hidden_masks + lid % 32);
    // Fragments being loaded: for qkv and out, and for gate_up, down and the head.
    Fragment b[DEPTH], c[DEPTH];

    for (uint i = lid; i < OUT_UNITS_PER_GROUP * 16 && group * OUT_UNITS_PER_GROUP * 16 + i < DIM; i += WG)
        residual[i] = x[group * OUT_UNITS_PER_GROUP * 16 + i];

    LOAD_FIRST(b, arena, AT_QKV, AT_QKV_SCALES, QKV, DIM, 0)
    for (uint layer = 0; layer < LAYERS; layer++) {
        const __global uchar *w = arena + (size_t)layer * LAYER_BYTES;
        const __global float *f = floats + layer * LAYER_FLOATS;
        __global uchar *keys = k_cache + (size_t)layer * header[H_K_STRIDE] * 64;
        __global uchar *values = v_cache + (size_t)layer * header[H_V_STRIDE] * 64;

        // norm, qkv
        tag++;
        {
            enum { once = UNITS_PER_ROUND(QKV, DIM), pairs = DIM / 64 };
            const int first = group * UNITS_PER_GROUP(QKV), units = min((int)UNITS_PER_GROUP(QKV), QKV / 16 - first);
            for (int done = 0; done < units; done += once) {
                const int now = min((int)once, units - done);
                Units u = units_from(w + AT_QKV, w + AT_QKV_SCALES, (first + done) * pairs, ~0u, 0);
                if (done > 0) LOAD_FIRST(b, w, AT_QKV, AT_QKV_SCALES, QKV, DIM, done)
                if (done == 0)
                    norm(work + W_DOWN, layer == 0 ? x : 0, f + F_ATTN_NORM, tag - 1, rows, acts, act_scales, red, sync);
                mma_accumulate(b, u, pairs, once * pairs, 0, now * pairs, HAS_FLOATS(DIM), acts, act_scales, parts, mask);
                if (done + once >= units) LOAD_FIRST(b, w, AT_OUT, AT_OUT_SCALES, DIM, Q_DIM, 0)
                if (warp < CEIL_DIV(now, 2)) {
                    uint row = (first + done) * 16 + lid;
                    bool mine = lid < now * 16;
                    float y = 0.0f;
                    if (mine) {
                        y = HAS_FLOATS(DIM) ? sum_of_floats(parts + lid * FLOATS_ROW(DIM / 32), DIM / 32)
                                        : sum_of_halves(parts + lid * HALVES_ROW(DIM / 32), act_scales, DIM / 32);
#if QKV_BIAS
                        y += f[F_QKV_BIAS + row];
#endif
                    }
                    send_rows(y, mine, work + W_QKV + row / 16 * SLOTS_PER_UNIT, tag);
                }
                if (units > once) barrier(CLK_LOCAL_MEM_FENCE);
            }
            if (units <= 0) LOAD_FIRST(b, w, AT_OUT, AT_OUT_SCALES, DIM, Q_DIM, 0)
        }

        // rope, attend: a task is a chunk of slots with a KV head's queries, or with one query head if chunks are few
        {
            __local float *head = (__local float *)acts, *p = head + HEAD_FLOATS;
            const uint heads = chunks * HEADS <= GRID ? 1 : GROUP, items = chunks * (HEADS / heads);
            const uint of_head = lid / HEAD_DIM, d = lid % HEAD_DIM;
            Piece kp[SWEEPS], vp[SWEEPS];
            if (group >= items) LOAD_FIRST_OF_GATE_UP(0)
            for (uint item = group, next; item < items; item = next) {
                const uint first_head = item % (HEADS / heads) * heads, kv_head = first_head / GROUP;
                const uint chunk = item / (HEADS / heads), first = chunk * CHUNK;
                const uint count = min((uint)CHUNK, slot + 1 - first);
                const bool last = chunk == chunks - 1;
                const uint newest = last ? slot - first : ~0u;
                if (item == group) {
                    load_rows(K_TYPE, kp, keys + ((size_t)kv_head * capacity + first) * K_ROW, K_ROW, count);
                    load_rows(V_TYPE, vp, values + ((size_t)kv_head * capacity + first) * V_ROW, V_ROW, count);
                }
                next = item + GRID;
                barrier(CLK_LOCAL_MEM_FENCE);
                __local float *k = head + heads * HEAD_DIM, *v = k + HEAD_DIM;
                for (uint i = lid; i < (heads + 2 * last) * (HEAD_DIM / 16 * SLOTS_PER_UNIT); i += WG) {
                    uint unit = i / SLOTS_PER_UNIT, part = i % SLOTS_PER_UNIT, of = unit / (HEAD_DIM / 16);
                    uint from = of < heads ? first_head * HEAD_DIM
                                : of == heads ? Q_PAD + (kv_head - heads) * HEAD_DIM
                                              : Q_PAD + KV_PAD + (kv_head - heads - 1) * HEAD_DIM;
                    const __global Slot *at = work + W_QKV + (from / 16 + unit) * SLOTS_PER_UNIT + part;
                    Slot s = wait_for_slot(poll_slot(at), at, tag, sync);
                    __local float *to = head + unit * 16 + part * 3;
                    to[0] = as_float(s.x);
                    if (part < SLOTS_PER_UNIT - 1) to[1] = as_float(s.y), to[2] = as_float(s.z);
                }
                barrier(CLK_LOCAL_MEM_FENCE);
                const __global float *calibrated = calibration + layer * LAYER_CALIBRATION + kv_head * CALIBRATION;
                prepare_queries(head, f + F_QK_NORM, calibrated, angles, heads, red);
                if (last) {
                    // The new row: one of the tasks that share it writes the cache, all keep it.
                    size_t row = (size_t)kv_head * capacity + slot;
                    bool write = first_head % GROUP == 0;
                    prepare_key(k, f + F_QK_NORM + HEAD_DIM, calibrated, angles, red);
                    prepare_value(v, red);
                    const __local float2 *value_scales = row_scales + ROW_BLOCKS * CANDIDATES;
                    scale_rows(k, row_scales, true);
                    store_row(K_TYPE, k, keys + row * K_ROW, row_scales, write);
                    store_row(V_TYPE, v, values + row * V_ROW, value_scales, write);
                    barrier(CLK_LOCAL_MEM_FENCE);
                    round_to_stored(K_TYPE, k, row_scales);
                    round_to_stored(V_TYPE, v, value_scales);
                }
                if (item == group) LOAD_FIRST_OF_GATE_UP(0)
                for (uint from = 0; from < CHUNK; from += STAGED_ROWS) {
                    stage_rows(K_TYPE, kp, from, newest, k, rows);
                    uint s = lid % STAGED_ROWS;
                    for (uint h = lid / STAGED_ROWS; h < heads; h += WG / STAGED_ROWS)
                        if (from + s < count) p[h * CHUNK + from + s] = score(rows + s * STAGE_ROW, head + h * HEAD_DIM);
                    barrier(CLK_LOCAL_MEM_FENCE);
                }
                for (uint h = warp; h < heads; h += WARPS) {
                    float2 ml = softmax_chunk(p + h * CHUNK, count);
                    if (lid % 32 == 0) weights[h] = ml;
                }
                float acc[CEIL_DIV(GROUP * HEAD_DIM, WG)];
                for (uint i = 0; i < CEIL_DIV(GROUP * HEAD_DIM, WG); i++) acc[i] = 0.0f;
                for (uint from = 0; from < CHUNK; from += STAGED_ROWS) {
                    stage_rows(V_TYPE, vp, from, newest, v, rows);
                    for (uint i = 0; i < CEIL_DIV(GROUP * HEAD_DIM, WG); i++) {
                        uint h = i * (WG / HEAD_DIM) + of_head;
                        if (h >= heads) continue;
                        const __local float *weight = p + h * CHUNK + from, *value = rows + d;
                        const uint end = min((uint)STAGED_ROWS, count - min(from, count));
                        acc[i] = weighted_sum(weight, value, end, acc[i]);
                    }
                    barrier(CLK_LOCAL_MEM_FENCE);
                }
                if (next < items) {
                    const uint its_head = next % (HEADS / heads) * heads / GROUP, its_first = next / (HEADS / heads) * CHUNK;
                    const uint its_count = min((uint)CHUNK, slot + 1 - its_first);
                    size_t row = (size_t)its_head * capacity + its_first;
                    load_rows(K_TYPE, kp, keys + row * K_ROW, K_ROW, its_count);
                    load_rows(V_TYPE, vp, values + row * V_ROW, V_ROW, its_count);
                }
                // The result of several chunks is one part per chunk; a single chunk gives the final result.
                __local float *sums = chunks > 1 ? rows : head;
                const uint stride = chunks > 1 ? 3 * SLOTS_PER_PART : HEAD_DIM;
                for (uint i = 0; i < CEIL_DIV(GROUP * HEAD_DIM, WG); i++) {
                    uint h = i * (WG / HEAD_DIM) + of_head;
                    if (h < heads) sums[h * stride + d] = chunks > 1 ? acc[i] : divide(acc[i], weights[h].y);
                }
                if (chunks > 1 && lid < heads) {
                    sums[lid * stride + HEAD_DIM] = weights[lid].x;
                    sums[lid * stride + HEAD_DIM + 1] = weights[lid].y;
                }
                barrier(CLK_LOCAL_MEM_FENCE);
                if (chunks > 1) {
                    for (uint i = lid; i < heads * SLOTS_PER_PART; i += WG) {
                        uint h = i / SLOTS_PER_PART, part = i % SLOTS_PER_PART;
                        __local uint *from = (__local uint *)sums + h * stride + part * 3;
                        write_slot(
                            work + W_PARTS + ((first_head + h) * (size_t)max_chunks + chunk) * SLOTS_PER_PART + part,
                            from[0], from[1], from[2], tag);
                    }
                } else {
#if V_ROTATED
                    rotate_heads(head, heads, true);
#endif
                    for (uint i = warp; i < heads * HEAD_DIM / 32; i += WARPS)
                        send_block(head[i * 32 + lid % 32],
                                  work + W_ATT + (first_head * (HEAD_DIM / 32) + i) * SLOTS_PER_BLOCK, tag + 1);
                }
            }
            // Merge the parts of a head in ascending order. The last work-groups have the fewest tasks.
            for (uint h = GRID - 1 - group; chunks > 1 && h < HEADS; h += GRID) {
                float m = LOWEST_SCORE, l = 0.0f, o = 0.0f;
                for (uint first = 0; first < chunks; first += PARTS_AT_ONCE) {
                    const uint n = min((uint)PARTS_AT_ONCE, chunks - first);
                    const __global Slot *from = work + W_PARTS + (h * (size_t)max_chunks + first) * SLOTS_PER_PART;
                    barrier(CLK_LOCAL_MEM_FENCE);
                    for (uint i = lid; i < n * SLOTS_PER_PART; i += WG) {
                        Slot s = wait_for_slot(poll_slot(from + i), from + i, tag, sync);
                        rows[i * 3] = as_float(s.x);
                        rows[i * 3 + 1] = as_float(s.y);
                        rows[i * 3 + 2] = as_float(s.z);
                    }
                    barrier(CLK_LOCAL_MEM_FENCE);
                    const __local float *most = rows + HEAD_DIM;
                    if (lid < n) {
                        float larger = m;
                        for (uint c = 0; c < lid; c++) larger = fmax(larger, most[c * 3 * SLOTS_PER_PART]);
                        weights[lid] = rescale_chunk(&larger, most[lid * 3 * SLOTS_PER_PART]);
                    }
                    for (uint c = 0; c < n; c++) m = fmax(m, most[c * 3 * SLOTS_PER_PART]);
                    barrier(CLK_LOCAL_MEM_FENCE);
                    for (uint c = 0; c < n; c++) {
                        const __local float *part = rows + c * 3 * SLOTS_PER_PART;
                        l = fma(part[HEAD_DIM + 1], weights[c].y, l * weights[c].x);
                        o = fma(part[d], weights[c].y, o * weights[c].x);
                    }
                }
                if (lid < HEAD_DIM) head[lid] = divide(o, l);
                barrier(CLK_LOCAL_MEM_FENCE);
#if V_ROTATED
                rotate_heads(head, 1, true);
#endif
                if (warp < HEAD_DIM / 32)
                    send_block(head[lid], work + W_ATT + (h * (HEAD_DIM / 32) + warp) * SLOTS_PER_BLOCK, tag + 1);
            }
        }

        // out, down: added to the residual
#define ADD_TO_RESIDUAL(c, cols, at, at_scales, from, to, bias, then)                                                     \
    {                                                                                                          \
        enum { once = UNITS_PER_ROUND(DIM, cols), pairs = (cols) / 64 };                                               \
        const int first = group * OUT_UNITS_PER_GROUP, units = min((int)OUT_UNITS_PER_GROUP, DIM / 16 - first);                      \
        for (int done = 0; done < units; done += once) {                                                       \
            const int now = min((int)once, units - done);                                                      \
            Units u = units_from(w + (at), w + (at_scales), (first + done) * pairs, ~0u, 0);                     \
            if (done > 0) LOAD_FIRST(c, w, at, at_scales, DIM, cols, done)                                          \
            if (done == 0) receive_blocks(work + (from), (cols) / 32, tag - 1, acts, act_scales, sync);           \
            mma_accumulate(c, u, pairs, once * pairs, 0, now * pairs, HAS_FLOATS(cols), acts, act_scales, parts, mask);      \
            if (done + once >= units) then                                                                     \
            if (warp < CEIL_DIV(now, 2)) {                                                                           \
                uint row = (first + done) * 16 + lid;                                                          \
                bool mine = lid < now * 16;                                                                    \
                float y = 0.0f;                                                                                \
                if (mine) {                                                                                    \
                    y = HAS_FLOATS(cols) ? sum_of_floats(parts + lid * FLOATS_ROW((cols) / 32), (cols) / 32)       \
                                     : sum_of_halves(parts + lid * HALVES_ROW((cols) / 32), act_scales, (cols) / 32); \
                    bias;                                                                                      \
                    y = residual[done * 16 + lid] + y;                                                         \
                    residual[done * 16 + lid] = y;                                                             \
                }                                                                                              \
                send_rows(y, mine, work + (to) + row / 16 * SLOTS_PER_UNIT, tag);                                      \
            }                                                                                                  \
            if (units > once) barrier(CLK_LOCAL_MEM_FENCE);                                                    \
        }                                                                                                      \
        if (units <= 0) then                                                                                   \
    }
        // Attention's tag, then the tag of this step.
        tag += 2;
#if O_BIAS
        ADD_TO_RESIDUAL(b, Q_DIM, AT_OUT, AT_OUT_SCALES, W_ATT, W_OUT, y += f[F_O_BIAS + row], ;)
#else
        ADD_TO_RESIDUAL(b, Q_DIM, AT_OUT, AT_OUT_SCALES, W_ATT, W_OUT, , ;)
#endif

        // norm, gate_up: gate and up side by side
        tag++;
        {
            enum { once = FFN_BLOCKS_PER_ROUND, pairs = DIM / 64 };
            const int first = group * FFN_BLOCKS_PER_GROUP, blocks = min((int)FFN_BLOCKS_PER_GROUP, FFN_DIM / 32 - first);
            for (int done = 0; done < blocks; done += once) {
                const int now = min((int)once, blocks - done);
                Units u = GATE_UP(first + done, now);
                if (done > 0) LOAD_FIRST_OF_GATE_UP(done)
                if (done == 0) norm(work + W_OUT, 0, f + F_FFN_NORM, tag - 1, rows, acts, act_scales, red, sync);
                mma_accumulate(c, u, pairs, 4 * once * pairs, 0, now * 4 * pairs, false, acts, act_scales, parts, mask);
                if (done + once >= blocks) LOAD_FIRST(c, w, AT_DOWN, AT_DOWN_SCALES, DIM, FFN_DIM, 0)
                if (lid < now * 64)
                    red[lid] = sum_of_halves(parts + lid * HALVES_ROW(DIM / 32), act_scales, DIM / 32);
                barrier(CLK_LOCAL_MEM_FENCE);
                if (warp < now)
                    send_block(silu(red[lid]) * red[now * 32 + lid], work + W_FFN + (first + done + warp) * SLOTS_PER_BLOCK, tag);
            }
            if (blocks <= 0) LOAD_FIRST(c, w, AT_DOWN, AT_DOWN_SCALES, DIM, FFN_DIM, 0)
        }

        tag++;
        ADD_TO_RESIDUAL(c, FFN_DIM, AT_DOWN, AT_DOWN_SCALES, W_FFN, W_DOWN, , {
            if (layer + 1 < LAYERS)
                LOAD_FIRST(b, w + LAYER_BYTES, AT_QKV, AT_QKV_SCALES, QKV, DIM, 0)
            else
                LOAD_FIRST_OF_HEAD
        })
    }

    // norm, head
    {
        enum { once = HEAD_UNITS_PER_ROUND, pairs = DIM / 64 };
        const int first = group * UNITS_PER_GROUP(HEAD_ROWS), units = min((int)UNITS_PER_GROUP(HEAD_ROWS), HEAD_ROWS / 16 - first);
        Units u = units_from(arena + AT_HEAD, arena + AT_HEAD_SCALES, first * pairs, ~0u, 0);
        if (units <= 0) return;
        norm(work + W_DOWN, 0, floats + LAYERS * LAYER_FLOATS, tag, rows, acts, act_scales, red, sync);
        for (int done = 0; done < units; done += once) {
            mma_accumulate(c, u, pairs, once * pairs, done * pairs, units * pairs, false, acts, act_scales, parts, mask);
            uint row = (first + done) * 16 + lid;
            if (lid < min((int)once, units - done) * 16 && row < VOCAB) {
                float y = sum_of_halves(parts + lid * HALVES_ROW(DIM / 32), act_scales, DIM / 32);
                if (row == 0 && *(volatile __global uint *)sync != 0) y = NAN;
                logits[row] = y;
            }
            barrier(CLK_LOCAL_MEM_FENCE);
        }
    }
}
