// attend for a run of many tokens, whose rows are in the cache and whose queries are ready. One work-group per KV head
// and tile of QUERIES queries (token-major, the heads of a group together), over chunks of the context. Each chunk has
// a softmax of its own, which is merged with the previous ones in ascending order.
//
// Products are computed in blocks: a work-item computes the scores of QUERIES_PER_ITEM queries with four slots, or the
// sums of QUERIES_PER_ITEM queries over runs of four elements, so that each value read from local memory is used
// several times. Meanwhile the rows of the next tile are loaded.
//
// softmax: [token of the run][HEADS][m, l], the largest score and the sum of e^(score - m), for the observed tokens,
// which are the last ones

#if !defined(QUERIES) || !defined(SLOTS) || !defined(QUERIES_PER_ITEM)
#error the tile of attention is not defined
#endif
// Work-items per block of queries: each computes four slots of a tile, then every LINE-th run of four elements.
#define LINE (SLOTS / 4)
// Work-items that share the softmax of a query: each has OWN_LANES adjacent lanes of sixteen, VECTOR at a time.
#define ITEMS_PER_QUERY (WG / QUERIES)
#define OWN_LANES (16 / ITEMS_PER_QUERY)
// Elements of a head, padded with zeros.
#define WIDTH (RUNS * 16)
#define FOURS_PER_ITEM ((WIDTH / 4 + LINE - 1) / LINE)
// Pitch of values, and of a query's scores, in local memory: neighbours start in different banks.
#define VALUE_PITCH (WIDTH + 4)
#define P_PITCH (CHUNK + 4)
// Position of the keys of four slots for one element, within its row of SLOTS. Adjacent work-items load the four runs
// of elements of a key; the order of the fours differs between runs, so that they write to different banks.
#define SLOT_PLACE(four, run) (4 * ((four) ^ (2 * (run) & 6 & (LINE - 1))))
// Maximum runs of sixteen elements of a tile's rows that a work-item copies to local memory.
#define UNITS ((SLOTS * RUNS + WG - 1) / WG)
#if QUERIES / QUERIES_PER_ITEM * LINE != WG || ITEMS_PER_QUERY < 1 || 8 % ITEMS_PER_QUERY != 0 || CHUNK % SLOTS != 0 || SLOTS % 4 != 0 || \
    (LINE & (LINE - 1)) != 0
#error the tile does not divide among the items
#endif
#if QUERIES_PER_ITEM == 4
#define load_each(p) (*(const __local float4 *)(p))
typedef float4 Queries;
#elif QUERIES_PER_ITEM == 2
#define load_each(p) (*(const __local float2 *)(p))
typedef float2 Queries;
#else
#error an item has two or four queries
#endif
#if OWN_LANES == 2
#define VECTOR 2
typedef float2 Vector;
#else
#define VECTOR 4
typedef float4 Vector;
#endif
typedef union {
    Vector all;
    float one[VECTOR];
} Lanes;
typedef union {
    float4 all;
    float one[4];
} Four;

// Partial products of lane `i`, for QUERIES_PER_ITEM queries at `q` and the keys `four`: [element][QUERIES] and
// [element][SLOTS].
void lane_sums(const __local float *q, const __local float *k, int four, int i, float4 *sums) {
    for (int j = 0; j < QUERIES_PER_ITEM; j++) sums[j] = 0.0f;
    UNROLL
    for (int r = 0; r < RUNS; r++) {
        union {
            Queries all;
            float one[QUERIES_PER_ITEM];
        } of;
        of.all = load_each(q + (16 * r + i) * QUERIES);
        const float4 key = *(const __local float4 *)(k + (16 * r + i) * SLOTS + SLOT_PLACE(four, r));
        for (int j = 0; j < QUERIES_PER_ITEM; j++) sums[j] = fma(key, (float4)(of.one[j]), sums[j]);
    }
}

void add_sums(float4 *a, const float4 *b) {
    for (int j = 0; j < QUERIES_PER_ITEM; j++) a[j] = a[j] + b[j];
}

// Lanes i, i + 4, i + 8 and i + 12, added in the order of sum16.
void sum_four_lanes(const __local float *q, const __local float *k, int four, int i, float4 *sums) {
    float4 b[QUERIES_PER_ITEM], c[QUERIES_PER_ITEM];
    lane_sums(q, k, four, i, sums);
    lane_sums(q, k, four, i + 8, b);
    add_sums(sums, b);
    lane_sums(q, k, four, i + 4, b);
    lane_sums(q, k, four, i + 12, c);
    add_sums(b, c);
    add_sums(sums, b);
}

void sum_all_lanes(const __local float *q, const __local float *k, int four, float4 *sums) {
    float4 b[QUERIES_PER_ITEM], c[QUERIES_PER_ITEM];
    sum_four_lanes(q, k, four, 0, sums);
    sum_four_lanes(q, k, four, 2, b);
    add_sums(sums, b);
    sum_four_lanes(q, k, four, 1, b);
    sum_four_lanes(q, k, four, 3, c);
    add_sums(b, c);
    add_sums(sums, b);
}

// Starts loading a work-item's units of a tile of rows. There are `count` rows; past them the last one is repeated.
void load_tile(int type, const __global uchar *rows, int row_bytes, int count, Stored16 *units) {
    UNROLL
    for (int u = 0; u < UNITS; u++) {
        int i = get_local_id(0) + u * WG, row = min(i / RUNS, count - 1);
        if (i < SLOTS * RUNS) units[u] = stored16(type, rows + (size_t)row * row_bytes, i % RUNS);
    }
}

// Stores them in local memory as floats: keys as [element][SLOTS], values as [slot][VALUE_PITCH].
void store_tile(int type, const Stored16 *units, bool keys, __local float *to) {
    UNROLL
    for (int u = 0; u < UNITS; u++) {
        int i = get_local_id(0) + u * WG, slot = i / RUNS, run = i % RUNS;
        union {
            float16 all;
            float one[16];
            float4 four[4];
        } e;
        if (i >= SLOTS * RUNS) break;
        e.all = widened16(type, units[u], run);
        if (keys) {
            __local float *at = to + run * 16 * SLOTS + SLOT_PLACE(slot / 4, run) + slot % 4;
            for (int k = 0; k < 16; k++) at[k * SLOTS] = e.one[k];
        } else {
            __local float4 *row = (__local float4 *)(to + slot * VALUE_PITCH + run * 16);
            for (int k = 0; k < 4; k++) row[k] = e.four[k];
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
}

// Number of slots of a chunk up to the last one visible to a query that sees `seen` slots; 0 if it sees none of them.
int visible_slots(int seen, int chunk) {
    int n = clamp(seen - chunk, 0, CHUNK);
#if WINDOW
    if (seen - WINDOW >= chunk + n) n = 0;
#endif
    return n;
}

// Adds the values of slots t to t + 3 times their weights to the sums of QUERIES_PER_ITEM queries, for the work-item's
// runs of four elements. If `some`, not all queries see all four slots: each sums only the first seen[j] slots.
void add_weighted_values(const __local float *weights, const __local float *values, int at, int t, bool some, const int *seen,
                float4 (*sums)[FOURS_PER_ITEM]) {
    Four weight[QUERIES_PER_ITEM];
    for (int j = 0; j < QUERIES_PER_ITEM; j++) weight[j].all = *(const __local float4 *)(weights + j * P_PITCH + t);
    UNROLL
    for (int s = 0; s < 4; s++)
        for (int k = 0; k < FOURS_PER_ITEM; k++) {
            // Past the end of a row, its last run is repeated; those sums are never read.
            const int four = min(at + k * LINE, WIDTH / 4 - 1);
            const float4 value = *(const __local float4 *)(values + (t + s) * VALUE_PITCH + 4 * four);
            for (int j = 0; j < QUERIES_PER_ITEM; j++) {
                const float4 sum = fma((float4)(weight[j].one[s]), value, sums[j][k]);
                sums[j][k] = !some || t + s < seen[j] ? sum : sums[j][k];
            }
        }
}

__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void attend(
    const __global float *qkv, const __global uchar *k_cache, const __global uchar *v_cache, __global float *att,
    __global float *softmax,
#if SINKS
    const __global float *calibration,
#endif
    Run run, int observed) {
    __local float4 q4[QUERIES * WIDTH / 4], kv4[SLOTS * VALUE_PITCH / 4], p4[QUERIES * P_PITCH / 4];
    __local float4 red4[QUERIES * 4];
    __local float max_scores[QUERIES * ITEMS_PER_QUERY];
    __local float2 of_query[QUERIES]; // factors of the previous sums and of the chunk's sums
    __local float *q = (__local float *)q4, *kv = (__local float *)kv4, *p = (__local float *)p4;
    __local float *red = (__local float *)red4;
    int lid = get_local_id(0), kv_head = get_group_id(1);
    int rows = TOKENS_OF(run) * GROUP, before = FIRST_SLOT(run), capacity = CAPACITY(run);
    qkv += (size_t)FIRST_TOKEN(run) * QKV;
    att += (size_t)FIRST_TOKEN(run) * Q_DIM;
    // Start with the tiles that see the most slots.
    int first_row = ((int)get_num_groups(0) - 1 - (int)get_group_id(0)) * QUERIES;
    for (int i = lid; i < QUERIES * WIDTH; i += WG) {
        int r = min(first_row + i / WIDTH, rows - 1), d = i % WIDTH;
        const __global float *query = qkv + (size_t)(r / GROUP) * QKV + (kv_head * GROUP + r % GROUP) * HEAD_DIM;
        q[d * QUERIES + i / WIDTH] = d < HEAD_DIM ? query[d] : 0.0f;
    }
    const __global uchar *keys = k_cache + (size_t)kv_head * capacity * K_ROW;
    const __global uchar *values = v_cache + (size_t)kv_head * capacity * V_ROW;
    // Number of slots seen by a query of the tile: the maximum, and that of the query whose softmax this work-item
    // shares.
#define SLOTS_SEEN_BY(query) (before + min(first_row + (query), rows - 1) / GROUP + 1)
    int mine = lid / ITEMS_PER_QUERY, share = lid % ITEMS_PER_QUERY;
    int all = SLOTS_SEEN_BY(QUERIES - 1), seen = SLOTS_SEEN_BY(mine);
    __local float *my_p = p + mine * P_PITCH + share * OWN_LANES, *my_red = red + mine * 16;
    float m = LOWEST_SCORE, l = 0.0f;
    // Block of queries, and index of the work-item in it.
    int block = lid / LINE * QUERIES_PER_ITEM, at = lid % LINE;
    int sees[QUERIES_PER_ITEM];
    for (int j = 0; j < QUERIES_PER_ITEM; j++) sees[j] = SLOTS_SEEN_BY(block + j);
    float4 o[QUERIES_PER_ITEM][FOURS_PER_ITEM];
    for (int j = 0; j < QUERIES_PER_ITEM; j++)
        for (int k = 0; k < FOURS_PER_ITEM; k++) o[j][k] = 0.0f;
    const int first_chunk = SKIPPED_CHUNKS(before + first_row / GROUP + 1) * CHUNK;
    Stored16 units[UNITS];
#define BEGIN_KEYS(slot) load_tile(K_TYPE, keys + (size_t)ROW_OF_SLOT(slot, run) * K_ROW, K_ROW, all - (slot), units)
#define BEGIN_VALUES(slot) load_tile(V_TYPE, values + (size_t)ROW_OF_SLOT(slot, run) * V_ROW, V_ROW, all - (slot), units)
    BEGIN_KEYS(first_chunk);
    for (int chunk = first_chunk; chunk < all; chunk += CHUNK) {
        int count = min(CHUNK, all - chunk), n = visible_slots(seen, chunk);
        for (int tile = 0; tile < count; tile += SLOTS) {
            store_tile(K_TYPE, units, true, kv);
            if (tile + SLOTS < count)
                BEGIN_KEYS(chunk + tile + SLOTS);
            else
                BEGIN_VALUES(chunk);
            float4 sums[QUERIES_PER_ITEM];
            sum_all_lanes(q + block, kv, at, sums);
            for (int j = 0; j < QUERIES_PER_ITEM; j++) {
#if WINDOW
                int4 slot = (int4)(0, 1, 2, 3) + (chunk + tile + 4 * at);
                sums[j] = select(sums[j], (float4)(LOWEST_SCORE), slot < (int4)(sees[j] - WINDOW));
#endif
                *(__local float4 *)(p + (block + j) * P_PITCH + tile + 4 * at) = sums[j];
            }
            barrier(CLK_LOCAL_MEM_FENCE);
        }
        // The largest score, then numerators and their sums by lane; invisible slots contribute 0.
        const int mine_seen = n - share * OWN_LANES;
        float most = LOWEST_SCORE;
        for (int v = 0; v < OWN_LANES; v += VECTOR) {
            for (int t = v; t < mine_seen; t += 16) {
                Lanes s;
                s.all = *(__local Vector *)(my_p + t);
                for (int i = 0; i < VECTOR; i++) most = fmax(most, t + i < mine_seen ? s.one[i] : LOWEST_SCORE);
            }
        }
        max_scores[lid] = most;
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int i = 0; i < ITEMS_PER_QUERY; i++) most = fmax(most, max_scores[mine * ITEMS_PER_QUERY + i]);
        for (int v = 0; v < OWN_LANES; v += VECTOR) {
            Lanes sum;
            sum.all = 0.0f;
            for (int t = v; t < mine_seen; t += 16) {
                Lanes s;
                s.all = *(__local Vector *)(my_p + t);
                UNROLL
                for (int i = 0; i < VECTOR; i++) {
                    const float e = exp_approx(s.one[i] - most);
                    s.one[i] = t + i < mine_seen ? e : 0.0f;
                }
                *(__local Vector *)(my_p + t) = s.all;
                sum.all += s.all;
            }
            *(__local Vector *)(my_red + share * OWN_LANES + v) = sum.all;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        // A chunk with no visible slot has a largest score of LOWEST_SCORE and sums of 0, so it changes nothing.
        float2 w = rescale_chunk(&m, most);
        l = fma(sum_lanes(my_red), w.y, l * w.x);
        if (share == 0) of_query[mine] = w;
        // Slots of which all queries of the block see every one, and those that at least one query sees.
        int least_n = CHUNK, most_n = 0, visible[QUERIES_PER_ITEM];
        for (int j = 0; j < QUERIES_PER_ITEM; j++) {
            visible[j] = visible_slots(sees[j], chunk);
            least_n = min(least_n, visible[j]);
            most_n = max(most_n, visible[j]);
        }
        float4 part[QUERIES_PER_ITEM][FOURS_PER_ITEM];
        for (int j = 0; j < QUERIES_PER_ITEM; j++)
            for (int k = 0; k < FOURS_PER_ITEM; k++) part[j][k] = 0.0f;
        for (int tile = 0; tile < count; tile += SLOTS) {
            store_tile(V_TYPE, units, false, kv);
            if (tile + SLOTS < count)
                BEGIN_VALUES(chunk + tile + SLOTS);
            else if (chunk + CHUNK < all)
                BEGIN_KEYS(chunk + CHUNK);
            const int whole = clamp(least_n - tile, 0, SLOTS) & ~3, some = clamp(most_n - tile, 0, SLOTS);
            const __local float *weights = p + block * P_PITCH + tile;
            int left[QUERIES_PER_ITEM];
            for (int j = 0; j < QUERIES_PER_ITEM; j++) left[j] = visible[j] - tile;
            for (int t = 0; t < whole; t += 4) add_weighted_values(weights, kv, at, t, false, left, part);
            for (int t = whole; t < some; t += 4) add_weighted_values(weights, kv, at, t, true, left, part);
            barrier(CLK_LOCAL_MEM_FENCE);
        }
        for (int j = 0; j < QUERIES_PER_ITEM; j++) {
            const float2 weigh = of_query[block + j];
            for (int k = 0; k < FOURS_PER_ITEM; k++) o[j][k] = fma(part[j][k], (float4)(weigh.y), o[j][k] * weigh.x);
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
#if SINKS
    const int head = kv_head * GROUP + min(first_row + mine, rows - 1) % GROUP;
    float2 w = rescale_chunk(&m, sink_score(calibration, q + mine, QUERIES, head));
    l = fma(1.0f, w.y, l * w.x);
    if (share == 0) of_query[mine] = w;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int j = 0; j < QUERIES_PER_ITEM; j++) {
        const float2 weigh = of_query[block + j];
        for (int k = 0; k < FOURS_PER_ITEM; k++) o[j][k] = fma((float4)(0.0f), (float4)(weigh.y), o[j][k] * weigh.x);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
#endif
    int query = first_row + mine;
    if (share == 0 && query < rows && query / GROUP >= TOKENS_OF(run) - observed) {
        vstore2((float2)(m, l), (size_t)(query / GROUP) * HEADS + kv_head * GROUP + query % GROUP, softmax);
    }
    if (share == 0) of_query[mine].x = l;
    barrier(CLK_LOCAL_MEM_FENCE);
    // q is free: all scores have been read. Rows are now packed, as rotate_heads expects.
    for (int j = 0; j < QUERIES_PER_ITEM; j++) {
        for (int k = 0; k < FOURS_PER_ITEM; k++) {
            Four e;
            e.all = o[j][k];
            int first = 4 * (at + k * LINE);
            for (int d = 0; d < 4; d++)
                if (first + d < HEAD_DIM) q[(block + j) * HEAD_DIM + first + d] = divide(e.one[d], of_query[block + j].x);
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
#if V_ROTATED
    rotate_heads(q, QUERIES, true);
#endif
    for (int i = lid; i < QUERIES * HEAD_DIM; i += WG) {
        int r = first_row + i / HEAD_DIM;
        if (r < rows) {
            int head = kv_head * GROUP + r % GROUP;
            att[(size_t)(r / GROUP) * Q_DIM + head * HEAD_DIM + i % HEAD_DIM] = q[i];
        }
    }
}
