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

// Distribution of a step's units: a work-group takes EACH adjacent ones, AT_ONCE per round, of which a warp takes BITES
// fragments.
#define EACH(rows) UP((rows) / 16, GRID)
#define BITES(units, cols) UP((units) * (cols) / 64, WARPS)
#define FLOATS(cols) (FIT_FLOATS((cols) / 32) > 0)
#define AT_ONCE(rows, cols) LESSER(EACH(rows), FLOATS(cols) ? FIT_FLOATS((cols) / 32) : FIT_HALVES((cols) / 32))
// For gate_up: whole blocks of what `down` reads.
#define FFN_EACH UP(FFN_DIM / 32, GRID)
#define FFN_AT_ONCE LESSER(FFN_EACH, FIT_HALVES(DIM / 32) / 4)
#define OUT_EACH EACH(DIM)

// Requests the first weights of a round, after `done` units of the work-group: as soon as registers are free, and when
// no awaited answer would queue behind them.
#define BEGIN(into, w, at, at_scales, rows, cols, done)                                                  \
    {                                                                                                    \
        const int left = min((int)EACH(rows), (rows) / 16 - (int)(group * EACH(rows))) - (done);         \
        Units ask = units_at((w) + (at), (w) + (at_scales), (group * EACH(rows) + (done)) * ((cols) / 64), ~0u, 0); \
        if (left > 0)                                                                                    \
            begin(into, ask, BITES(AT_ONCE(rows, cols), cols),                              \
                  min((int)AT_ONCE(rows, cols), left) * ((cols) / 64));                                  \
    }
#define BEGIN_HEAD                                                                                           \
    {                                                                                                        \
        const int left = min((int)EACH(HEAD_ROWS), HEAD_ROWS / 16 - (int)(group * EACH(HEAD_ROWS)));         \
        Units ask = units_at(arena + AT_HEAD, arena + AT_HEAD_SCALES, group * EACH(HEAD_ROWS) * (DIM / 64), ~0u, 0);              \
        if (left > 0) begin(c, ask, BITES(HEAD_AT_ONCE, DIM), left * (DIM / 64));                  \
    }
// `now` blocks of rows from `first` on, of gate and then of up.
#define GATE_UP(first, now)                                                                                     \
    units_at(w + AT_GATE_UP, w + AT_GATE_UP_SCALES, (first) * 2 * (DIM / 64), (now) * 2 * (DIM / 64),           \
             (FFN_PAD / 16 - (now) * 2) * (DIM / 64))
#define BEGIN_GATE_UP(done)                                                                                     \
    {                                                                                                           \
        const int left = min((int)FFN_EACH, FFN_DIM / 32 - (int)(group * FFN_EACH)) - (done);                   \
        const int now = min((int)FFN_AT_ONCE, left);                                                            \
        Units ask = GATE_UP(group * FFN_EACH + (done), now);                                                                   \
        if (left > 0) begin(c, ask, BITES(4 * FFN_AT_ONCE, DIM), now * 4 * (DIM / 64));               \
    }

// ---------------------------------------------------------------- token

// arena: matrices, layer by layer, then the head
// floats: [layer][attn norm | ffn norm | qkv bias | o bias | q, k norm], then the final norm
// state: kernels/common.cl. work: see below, in slots. sync: set if a work-group was given up
#define W_QKV 0
#define W_ATT (W_QKV + QKV / 16 * OF_ROWS)
#define W_OUT (W_ATT + Q_DIM / 32 * OF_BLOCK)   // the residual after attention
#define W_FFN (W_OUT + DIM / 16 * OF_ROWS)
#define W_DOWN (W_FFN + FFN_DIM / 32 * OF_BLOCK) // the residual after a layer
#define W_PARTS (W_DOWN + DIM / 16 * OF_ROWS)   // [head][chunk][OF_PART]

// Local memory of attention, shared with the activations of other steps.
#define HEAD_FLOATS ((GROUP + 2) * HEAD_DIM)
#define ATTEND_FLOATS (HEAD_FLOATS + GROUP * CHUNK)

__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void decode(
    const __global uchar *arena, const __global float *floats, const __global float *calibration,
    __global uchar *k_cache, __global uchar *v_cache, const __global float *state, __global Slot *work,
    __global uint *sync, __global float *logits) {
    __local uint4 parts4[UP(PARTS + MARGIN, 4)];
    __local uint4 acts4[UP(WIDER(WIDEST / 4, ATTEND_FLOATS), 4)];
    __local float act_scales[WIDEST / 32 + MARGIN];
    __local float residual[OUT_EACH * 16];
    __local float red[WIDER(FFN_AT_ONCE * 64, (GROUP + 2) * 16)];
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
    __local uint known[32];
    if (lid < 32) known[lid] = 0xf0f0f0f0u;
    barrier(CLK_LOCAL_MEM_FENCE);
    const uint mask = *(volatile __local uint *)(known + lid % 32);
    // Fragments being loaded: for qkv and out, and for gate_up, down and the head.
    Bite b[DEPTH], c[DEPTH];

    for (uint i = lid; i < OUT_EACH * 16 && group * OUT_EACH * 16 + i < DIM; i += WG)
        residual[i] = x[group * OUT_EACH * 16 + i];

    BEGIN(b, arena, AT_QKV, AT_QKV_SCALES, QKV, DIM, 0)
    for (uint layer = 0; layer < LAYERS; layer++) {
        const __global uchar *w = arena + (size_t)layer * LAYER_BYTES;
        const __global float *f = floats + layer * LAYER_FLOATS;
        __global uchar *keys = k_cache + (size_t)layer * header[H_K_STRIDE] * 64;
        __global uchar *values = v_cache + (size_t)layer * header[H_V_STRIDE] * 64;

        // norm, qkv
        tag++;
        {
            enum { once = AT_ONCE(QKV, DIM), pairs = DIM / 64 };
            const int first = group * EACH(QKV), units = min((int)EACH(QKV), QKV / 16 - first);
            for (int done = 0; done < units; done += once) {
                const int now = min((int)once, units - done);
                Units u = units_at(w + AT_QKV, w + AT_QKV_SCALES, (first + done) * pairs, ~0u, 0);
                if (done > 0) BEGIN(b, w, AT_QKV, AT_QKV_SCALES, QKV, DIM, done)
                if (done == 0)
                    norm(work + W_DOWN, layer == 0 ? x : 0, f + F_ATTN_NORM, tag - 1, rows, acts, act_scales, red, sync);
                chew(b, u, pairs, once * pairs, 0, now * pairs, FLOATS(DIM), acts, act_scales, parts, mask);
                if (done + once >= units) BEGIN(b, w, AT_OUT, AT_OUT_SCALES, DIM, Q_DIM, 0)
                if (warp < UP(now, 2)) {
                    uint row = (first + done) * 16 + lid;
                    bool mine = lid < now * 16;
                    float y = 0.0f;
                    if (mine) {
                        y = FLOATS(DIM) ? sum_of_floats(parts + lid * FLOATS_ROW(DIM / 32), DIM / 32)
                                        : sum_of_halves(parts + lid * HALVES_ROW(DIM / 32), act_scales, DIM / 32);
#if QKV_BIAS
                        y += f[F_QKV_BIAS + row];
#endif
                    }
                    put_rows(y, mine, work + W_QKV + row / 16 * OF_ROWS, tag);
                }
                if (units > once) barrier(CLK_LOCAL_MEM_FENCE);
            }
            if (units <= 0) BEGIN(b, w, AT_OUT, AT_OUT_SCALES, DIM, Q_DIM, 0)
        }

        // rope, attend: a task is a chunk of slots with a KV head's queries, or with one query head if chunks are few
        {
            __local float *head = (__local float *)acts, *p = head + HEAD_FLOATS;
            const uint heads = chunks * HEADS <= GRID ? 1 : GROUP, items = chunks * (HEADS / heads);
            const uint of_head = lid / HEAD_DIM, d = lid % HEAD_DIM;
            Piece kp[SWEEPS], vp[SWEEPS];
            if (group >= items) BEGIN_GATE_UP(0)
            for (uint item = group, next; item < items; item = next) {
                const uint first_head = item % (HEADS / heads) * heads, kv_head = first_head / GROUP;
                const uint chunk = item / (HEADS / heads), first = chunk * CHUNK;
                const uint count = min((uint)CHUNK, slot + 1 - first);
                const bool last = chunk == chunks - 1;
                const uint newest = last ? slot - first : ~0u;
                if (item == group) {
                    begin_rows(K_TYPE, kp, keys + ((size_t)kv_head * capacity + first) * K_ROW, K_ROW, count);
                    begin_rows(V_TYPE, vp, values + ((size_t)kv_head * capacity + first) * V_ROW, V_ROW, count);
                }
                next = item + GRID;
                barrier(CLK_LOCAL_MEM_FENCE);
                __local float *k = head + heads * HEAD_DIM, *v = k + HEAD_DIM;
                for (uint i = lid; i < (heads + 2 * last) * (HEAD_DIM / 16 * OF_ROWS); i += WG) {
                    uint unit = i / OF_ROWS, part = i % OF_ROWS, of = unit / (HEAD_DIM / 16);
                    uint from = of < heads ? first_head * HEAD_DIM
                                : of == heads ? Q_PAD + (kv_head - heads) * HEAD_DIM
                                              : Q_PAD + KV_PAD + (kv_head - heads - 1) * HEAD_DIM;
                    const __global Slot *at = work + W_QKV + (from / 16 + unit) * OF_ROWS + part;
                    Slot s = wait_for(look(at), at, tag, sync);
                    __local float *to = head + unit * 16 + part * 3;
                    to[0] = as_float(s.x);
                    if (part < OF_ROWS - 1) to[1] = as_float(s.y), to[2] = as_float(s.z);
                }
                barrier(CLK_LOCAL_MEM_FENCE);
                const __global float *calibrated = calibration + layer * LAYER_CALIBRATION + kv_head * CALIBRATION;
                ready_queries(head, f + F_QK_NORM, calibrated, angles, heads, red);
                if (last) {
                    // The new row: one of the tasks that share it writes the cache, all keep it.
                    size_t row = (size_t)kv_head * capacity + slot;
                    bool write = first_head % GROUP == 0;
                    ready_key(k, f + F_QK_NORM + HEAD_DIM, calibrated, angles, red);
                    ready_value(v);
                    const __local float2 *value_scales = row_scales + ROW_BLOCKS * CANDIDATES;
                    scale_rows(k, row_scales, true);
                    store_row(K_TYPE, k, keys + row * K_ROW, row_scales, write);
                    store_row(V_TYPE, v, values + row * V_ROW, value_scales, write);
                    barrier(CLK_LOCAL_MEM_FENCE);
                    settle(K_TYPE, k, row_scales);
                    settle(V_TYPE, v, value_scales);
                }
                if (item == group) BEGIN_GATE_UP(0)
                for (uint from = 0; from < CHUNK; from += STAGED) {
                    stage(K_TYPE, kp, from, newest, k, rows);
                    uint s = lid % STAGED;
                    for (uint h = lid / STAGED; h < heads; h += WG / STAGED)
                        if (from + s < count) p[h * CHUNK + from + s] = score(rows + s * STAGE_ROW, head + h * HEAD_DIM);
                    barrier(CLK_LOCAL_MEM_FENCE);
                }
                for (uint h = warp; h < heads; h += WARPS) {
                    float2 ml = soften(p + h * CHUNK, count);
                    if (lid % 32 == 0) weights[h] = ml;
                }
                float acc[UP(GROUP * HEAD_DIM, WG)];
                for (uint i = 0; i < UP(GROUP * HEAD_DIM, WG); i++) acc[i] = 0.0f;
                for (uint from = 0; from < CHUNK; from += STAGED) {
                    stage(V_TYPE, vp, from, newest, v, rows);
                    for (uint i = 0; i < UP(GROUP * HEAD_DIM, WG); i++) {
                        uint h = i * (WG / HEAD_DIM) + of_head;
                        if (h >= heads) continue;
                        const __local float *weight = p + h * CHUNK + from, *value = rows + d;
                        const uint end = min((uint)STAGED, count - min(from, count));
                        acc[i] = weigh(weight, value, end, acc[i]);
                    }
                    barrier(CLK_LOCAL_MEM_FENCE);
                }
                if (next < items) {
                    const uint its_head = next % (HEADS / heads) * heads / GROUP, its_first = next / (HEADS / heads) * CHUNK;
                    const uint its_count = min((uint)CHUNK, slot + 1 - its_first);
                    size_t row = (size_t)its_head * capacity + its_first;
                    begin_rows(K_TYPE, kp, keys + row * K_ROW, K_ROW, its_count);
                    begin_rows(V_TYPE, vp, values + row * V_ROW, V_ROW, its_count);
                }
                // The result of several chunks is one part per chunk; a single chunk gives the final result.
                __local float *sums = chunks > 1 ? rows : head;
                const uint stride = chunks > 1 ? 3 * OF_PART : HEAD_DIM;
                for (uint i = 0; i < UP(GROUP * HEAD_DIM, WG); i++) {
                    uint h = i * (WG / HEAD_DIM) + of_head;
                    if (h < heads) sums[h * stride + d] = chunks > 1 ? acc[i] : divide(acc[i], weights[h].y);
                }
                if (chunks > 1 && lid < heads) {
                    sums[lid * stride + HEAD_DIM] = weights[lid].x;
                    sums[lid * stride + HEAD_DIM + 1] = weights[lid].y;
                }
                barrier(CLK_LOCAL_MEM_FENCE);
                if (chunks > 1) {
                    for (uint i = lid; i < heads * OF_PART; i += WG) {
                        uint h = i / OF_PART, part = i % OF_PART;
                        __local uint *from = (__local uint *)sums + h * stride + part * 3;
                        put_slot(work + W_PARTS + ((first_head + h) * (size_t)max_chunks + chunk) * OF_PART + part,
                                 from[0], from[1], from[2], tag);
                    }
                } else {
#if V_ROTATED
                    rotate_heads(head, heads, true);
#endif
                    for (uint i = warp; i < heads * HEAD_DIM / 32; i += WARPS)
                        put_block(head[i * 32 + lid % 32],
                                  work + W_ATT + (first_head * (HEAD_DIM / 32) + i) * OF_BLOCK, tag + 1);
                }
            }
            // Merge the parts of a head in ascending order. The last work-groups have the fewest tasks.
            for (uint h = GRID - 1 - group; chunks > 1 && h < HEADS; h += GRID) {
                float m = LEAST, l = 0.0f, o = 0.0f;
                for (uint first = 0; first < chunks; first += PARTS_AT_ONCE) {
                    const uint n = min((uint)PARTS_AT_ONCE, chunks - first);
                    const __global Slot *from = work + W_PARTS + (h * (size_t)max_chunks + first) * OF_PART;
                    barrier(CLK_LOCAL_MEM_FENCE);
                    for (uint i = lid; i < n * OF_PART; i += WG) {
                        Slot s = wait_for(look(from + i), from + i, tag, sync);
                        rows[i * 3] = as_float(s.x);
                        rows[i * 3 + 1] = as_float(s.y);
                        rows[i * 3 + 2] = as_float(s.z);
                    }
                    barrier(CLK_LOCAL_MEM_FENCE);
                    const __local float *most = rows + HEAD_DIM;
                    if (lid < n) {
                        float larger = m;
                        for (uint c = 0; c < lid; c++) larger = fmax(larger, most[c * 3 * OF_PART]);
                        weights[lid] = weigh_chunk(&larger, most[lid * 3 * OF_PART]);
                    }
                    for (uint c = 0; c < n; c++) m = fmax(m, most[c * 3 * OF_PART]);
                    barrier(CLK_LOCAL_MEM_FENCE);
                    for (uint c = 0; c < n; c++) {
                        const __local float *part = rows + c * 3 * OF_PART;
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
                    put_block(head[lid], work + W_ATT + (h * (HEAD_DIM / 32) + warp) * OF_BLOCK, tag + 1);
            }
        }

        // out, down: added to the residual
#define JOIN(c, cols, at, at_scales, from, to, bias, then)                                                     \
    {                                                                                                          \
        enum { once = AT_ONCE(DIM, cols), pairs = (cols) / 64 };                                               \
        const int first = group * OUT_EACH, units = min((int)OUT_EACH, DIM / 16 - first);                      \
        for (int done = 0; done < units; done += once) {                                                       \
            const int now = min((int)once, units - done);                                                      \
            Units u = units_at(w + (at), w + (at_scales), (first + done) * pairs, ~0u, 0);                     \
            if (done > 0) BEGIN(c, w, at, at_scales, DIM, cols, done)                                          \
            if (done == 0) take_blocks(work + (from), (cols) / 32, tag - 1, acts, act_scales, sync);           \
            chew(c, u, pairs, once * pairs, 0, now * pairs, FLOATS(cols), acts, act_scales, parts, mask);      \
            if (done + once >= units) then                                                                     \
            if (warp < UP(now, 2)) {                                                                           \
                uint row = (first + done) * 16 + lid;                                                          \
                bool mine = lid < now * 16;                                                                    \
                float y = 0.0f;                                                                                \
                if (mine) {                                                                                    \
                    y = FLOATS(cols) ? sum_of_floats(parts + lid * FLOATS_ROW((cols) / 32), (cols) / 32)       \
                                     : sum_of_halves(parts + lid * HALVES_ROW((cols) / 32), act_scales, (cols) / 32); \
                    bias;                                                                                      \
                    y = residual[done * 16 + lid] + y;                                                         \
                    residual[done * 16 + lid] = y;                                                             \
                }                                                                                              \
                put_rows(y, mine, work + (to) + row / 16 * OF_ROWS, tag);                                      \
            }                                                                                                  \
            if (units > once) barrier(CLK_LOCAL_MEM_FENCE);                                                    \
        }                                                                                                      \
        if (units <= 0) then                                                                                   \
    }
        // Attention's tag, then the tag of this step.
        tag += 2;
#if O_BIAS
        JOIN(b, Q_DIM, AT_OUT, AT_OUT_SCALES, W_ATT, W_OUT, y += f[F_O_BIAS + row], ;)
#else
        JOIN(b, Q_DIM, AT_OUT, AT_OUT_SCALES, W_ATT, W_OUT, , ;)
#endif

        // norm, gate_up: gate and up side by side
        tag++;
        {
            enum { once = FFN_AT_ONCE, pairs = DIM / 64 };
            const int first = group * FFN_EACH, blocks = min((int)FFN_EACH, FFN_DIM / 32 - first);
            for (int done = 0; done < blocks; done += once) {
                const int now = min((int)once, blocks - done);
                Units u = GATE_UP(first + done, now);
                if (done > 0) BEGIN_GATE_UP(done)
                if (done == 0) norm(work + W_OUT, 0, f + F_FFN_NORM, tag - 1, rows, acts, act_scales, red, sync);
                chew(c, u, pairs, 4 * once * pairs, 0, now * 4 * pairs, false, acts, act_scales, parts, mask);
                if (done + once >= blocks) BEGIN(c, w, AT_DOWN, AT_DOWN_SCALES, DIM, FFN_DIM, 0)
                if (lid < now * 64)
                    red[lid] = sum_of_halves(parts + lid * HALVES_ROW(DIM / 32), act_scales, DIM / 32);
                barrier(CLK_LOCAL_MEM_FENCE);
                if (warp < now)
                    put_block(silu(red[lid]) * red[now * 32 + lid], work + W_FFN + (first + done + warp) * OF_BLOCK, tag);
            }
            if (blocks <= 0) BEGIN(c, w, AT_DOWN, AT_DOWN_SCALES, DIM, FFN_DIM, 0)
        }

        tag++;
        JOIN(c, FFN_DIM, AT_DOWN, AT_DOWN_SCALES, W_FFN, W_DOWN, , {
            if (layer + 1 < LAYERS)
                BEGIN(b, w + LAYER_BYTES, AT_QKV, AT_QKV_SCALES, QKV, DIM, 0)
            else
                BEGIN_HEAD
        })
    }

    // norm, head
    {
        enum { once = HEAD_AT_ONCE, pairs = DIM / 64 };
        const int first = group * EACH(HEAD_ROWS), units = min((int)EACH(HEAD_ROWS), HEAD_ROWS / 16 - first);
        Units u = units_at(arena + AT_HEAD, arena + AT_HEAD_SCALES, first * pairs, ~0u, 0);
        if (units <= 0) return;
        norm(work + W_DOWN, 0, floats + LAYERS * LAYER_FLOATS, tag, rows, acts, act_scales, red, sync);
        for (int done = 0; done < units; done += once) {
            chew(c, u, pairs, once * pairs, done * pairs, units * pairs, false, acts, act_scales, parts, mask);
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
