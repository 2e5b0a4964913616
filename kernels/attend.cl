// attend of a run of many tokens, whose rows are in the cache and whose queries are ready. One work-group per KV head and
// tile of QUERIES queries (token-major, the heads of the group together), over chunks of the context. A chunk is a softmax
// of its own, merged into what is there, in ascending order.
//
// Products are those of blocks: an item has the scores of EACH queries with four slots, or the sums of EACH queries of
// runs of four elements, so that what it reads from local memory serves several of them.
//
// softmax: [token of the run][HEADS][m, l], the largest score and the sum of e^(score - m) of the tokens that are
// observed, the last ones

#if !defined(QUERIES) || !defined(SLOTS) || !defined(EACH)
#error the tile of attention is not defined
#endif
// Items of one block of queries: each has four slots of a tile, then every so manieth run of four elements.
#define LINE (SLOTS / 4)
// Items that share a query's softmax.
#define SHARE (WG / QUERIES)
// Elements of a head, and zeros.
#define WIDTH (RUNS * 16)
#define FOURS ((WIDTH / 4 + LINE - 1) / LINE)
// Rows of values, and scores of a query, in local memory: neighbours begin in different banks.
#define VALUE_PITCH (WIDTH + 4)
#define P_PITCH (CHUNK + 4)
#if QUERIES / EACH * LINE != WG || SHARE < 1 || 16 % SHARE != 0 || CHUNK % SLOTS != 0 || SLOTS % 4 != 0
#error the tile does not divide among the items
#endif
#if EACH == 4
#define of_each(p) (*(const __local float4 *)(p))
typedef float4 Each;
#elif EACH == 2
#define of_each(p) (*(const __local float2 *)(p))
typedef float2 Each;
#else
#error an item has two or four queries
#endif

// Products of lane `i` of EACH queries at q and of four keys at k, [element][QUERIES] and [element][SLOTS].
void lane_of(const __local float *q, const __local float *k, int i, float4 *sums) {
    for (int j = 0; j < EACH; j++) sums[j] = 0.0f;
    UNROLL
    for (int e = i; e < WIDTH; e += 16) {
        union {
            Each all;
            float one[EACH];
        } of;
        of.all = of_each(q + e * QUERIES);
        const float4 key = *(const __local float4 *)(k + e * SLOTS);
        for (int j = 0; j < EACH; j++) sums[j] = fma(key, (float4)(of.one[j]), sums[j]);
    }
}

void join(float4 *a, const float4 *b) {
    for (int j = 0; j < EACH; j++) a[j] = a[j] + b[j];
}

// Lanes i, i + 4, i + 8 and i + 12, in the order of sum16.
void four_lanes(const __local float *q, const __local float *k, int i, float4 *sums) {
    float4 b[EACH], c[EACH];
    lane_of(q, k, i, sums);
    lane_of(q, k, i + 8, b);
    join(sums, b);
    lane_of(q, k, i + 4, b);
    lane_of(q, k, i + 12, c);
    join(b, c);
    join(sums, b);
}

void all_lanes(const __local float *q, const __local float *k, float4 *sums) {
    float4 b[EACH], c[EACH];
    four_lanes(q, k, 0, sums);
    four_lanes(q, k, 2, b);
    join(sums, b);
    four_lanes(q, k, 1, b);
    four_lanes(q, k, 3, c);
    join(b, c);
    join(sums, b);
}

// Rows first.. as floats, of those past `count` the last one: [element][SLOTS], or [slot][VALUE_PITCH].
void widen_rows(int type, const __global uchar *rows, int row_bytes, int count, bool by_element, __local float *to) {
    for (int i = get_local_id(0); i < SLOTS * RUNS; i += WG) {
        int slot = i % SLOTS, run = i / SLOTS;
        union {
            float16 all;
            float one[16];
            float4 four[4];
        } e;
        e.all = row16(type, rows + (size_t)min(slot, count - 1) * row_bytes, run);
        if (by_element) {
            for (int k = 0; k < 16; k++) to[(run * 16 + k) * SLOTS + slot] = e.one[k];
        } else {
            __local float4 *row = (__local float4 *)(to + slot * VALUE_PITCH + run * 16);
            for (int k = 0; k < 4; k++) row[k] = e.four[k];
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
}

// Slots of a chunk up to the last one that a query sees, which sees so many in all; none where it sees none of them.
int shown(int seen, int chunk) {
    int n = clamp(seen - chunk, 0, CHUNK);
#if WINDOW
    if (seen - WINDOW >= chunk + n) n = 0;
#endif
    return n;
}

__kernel __attribute__((reqd_work_group_size(WG, 1, 1))) void attend(
    const __global float *qkv, const __global uchar *k_cache, const __global uchar *v_cache, __global float *att,
    __global float *softmax, Run run, int observed) {
    __local float4 q4[QUERIES * WIDTH / 4], kv4[SLOTS * VALUE_PITCH / 4], p4[QUERIES * P_PITCH / 4];
    __local float red[QUERIES * 16];
    __local float2 of_query[QUERIES]; // what earlier sums weigh, and a chunk's
    __local float *q = (__local float *)q4, *kv = (__local float *)kv4, *p = (__local float *)p4;
    int lid = get_local_id(0), kv_head = get_group_id(1);
    int rows = TOKENS_OF(run) * GROUP, before = FIRST_SLOT(run), capacity = CAPACITY(run);
    qkv += (size_t)FIRST_TOKEN(run) * QKV;
    att += (size_t)FIRST_TOKEN(run) * Q_DIM;
    int first_row = get_group_id(0) * QUERIES;
    for (int i = lid; i < QUERIES * WIDTH; i += WG) {
        int r = min(first_row + i / WIDTH, rows - 1), d = i % WIDTH;
        const __global float *query = qkv + (size_t)(r / GROUP) * QKV + (kv_head * GROUP + r % GROUP) * HEAD_DIM;
        q[d * QUERIES + i / WIDTH] = d < HEAD_DIM ? query[d] : 0.0f;
    }
    const __global uchar *keys = k_cache + (size_t)kv_head * capacity * K_ROW;
    const __global uchar *values = v_cache + (size_t)kv_head * capacity * V_ROW;
    // Slots that a query of the tile sees: the most, and those of the query whose softmax this item shares.
#define SEES(query) (before + min(first_row + (query), rows - 1) / GROUP + 1)
    int mine = lid / SHARE, share = lid % SHARE;
    int all = SEES(QUERIES - 1), seen = SEES(mine);
    __local float *my_p = p + mine * P_PITCH, *my_red = red + mine * 16;
    float m = LEAST, l = 0.0f;
    // The block of queries, and which of its items.
    int block = lid / LINE * EACH, at = lid % LINE;
    int sees[EACH];
    for (int j = 0; j < EACH; j++) sees[j] = SEES(block + j);
    float4 o[EACH][FOURS];
    for (int j = 0; j < EACH; j++)
        for (int k = 0; k < FOURS; k++) o[j][k] = 0.0f;
    for (int chunk = SKIPPED(before + first_row / GROUP + 1) * CHUNK; chunk < all; chunk += CHUNK) {
        int row = AT_ROW(chunk, run), count = min(CHUNK, all - chunk), n = shown(seen, chunk);
        for (int tile = 0; tile < count; tile += SLOTS) {
            widen_rows(K_TYPE, keys + (size_t)(row + tile) * K_ROW, K_ROW, count - tile, true, kv);
            float4 sums[EACH];
            all_lanes(q + block, kv + 4 * at, sums);
            for (int j = 0; j < EACH; j++) {
#if WINDOW
                int4 slot = (int4)(0, 1, 2, 3) + (chunk + tile + 4 * at);
                sums[j] = select(sums[j], (float4)(LEAST), slot < (int4)(sees[j] - WINDOW));
#endif
                *(__local float4 *)(p + (block + j) * P_PITCH + tile + 4 * at) = sums[j];
            }
            barrier(CLK_LOCAL_MEM_FENCE);
        }
        // The largest score, then numerators and their sums by lane, of sixteen lanes in all.
        for (int lane = share; lane < 16; lane += SHARE) {
            float most = LEAST;
            for (int t = lane; t < n; t += 16) most = fmax(most, my_p[t]);
            my_red[lane] = most;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        float most = LEAST;
        for (int i = 0; i < 16; i++) most = fmax(most, my_red[i]);
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int lane = share; lane < 16; lane += SHARE) {
            float sum = 0.0f;
            for (int t = lane; t < n; t += 16) {
                float e = e_to(my_p[t] - most);
                my_p[t] = e;
                sum += e;
            }
            my_red[lane] = sum;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        // A chunk of which nothing is seen has a largest score of LEAST and changes nothing: its sums are 0.
        float2 w = weigh_chunk(&m, most);
        l = fma(sum_lanes(my_red), w.y, l * w.x);
        if (share == 0) of_query[mine] = w;
        // Slots that all queries of the block see something of, and those that one of them does.
        int least_n = CHUNK, most_n = 0, visible[EACH];
        for (int j = 0; j < EACH; j++) {
            visible[j] = shown(sees[j], chunk);
            least_n = min(least_n, visible[j]);
            most_n = max(most_n, visible[j]);
        }
        float4 part[EACH][FOURS];
        for (int j = 0; j < EACH; j++)
            for (int k = 0; k < FOURS; k++) part[j][k] = 0.0f;
        for (int tile = 0; tile < count; tile += SLOTS) {
            widen_rows(V_TYPE, values + (size_t)(row + tile) * V_ROW, V_ROW, count - tile, false, kv);
            const int whole = clamp(least_n - tile, 0, SLOTS) & ~3, some = clamp(most_n - tile, 0, SLOTS);
            const __local float *weights = p + block * P_PITCH + tile;
            // Past the end of a row its last run comes again, whose sums nobody reads.
#define VALUE(t, k) (*(const __local float4 *)(kv + (t) * VALUE_PITCH + 4 * min(at + (k) * LINE, WIDTH / 4 - 1)))
            for (int t = 0; t < whole; t += 4) {
                union {
                    float4 all;
                    float one[4];
                } weight[EACH];
                for (int j = 0; j < EACH; j++) weight[j].all = *(const __local float4 *)(weights + j * P_PITCH + t);
                UNROLL
                for (int s = 0; s < 4; s++)
                    for (int k = 0; k < FOURS; k++) {
                        const float4 value = VALUE(t + s, k);
                        for (int j = 0; j < EACH; j++) part[j][k] = fma((float4)(weight[j].one[s]), value, part[j][k]);
                    }
            }
            for (int t = whole; t < some; t++)
                for (int j = 0; j < EACH; j++)
                    if (tile + t < visible[j])
                        for (int k = 0; k < FOURS; k++)
                            part[j][k] = fma((float4)(weights[j * P_PITCH + t]), VALUE(t, k), part[j][k]);
            barrier(CLK_LOCAL_MEM_FENCE);
        }
        for (int j = 0; j < EACH; j++) {
            const float2 weigh = of_query[block + j];
            for (int k = 0; k < FOURS; k++) o[j][k] = fma(part[j][k], (float4)(weigh.y), o[j][k] * weigh.x);
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    int query = first_row + mine;
    if (share == 0 && query < rows && query / GROUP >= TOKENS_OF(run) - observed) {
        vstore2((float2)(m, l), (size_t)(query / GROUP) * HEADS + kv_head * GROUP + query % GROUP, softmax);
    }
    if (share == 0) of_query[mine].x = l;
    barrier(CLK_LOCAL_MEM_FENCE);
    // q is free: every item has read its last score. Rows lie close now, as rotate_heads expects them.
    for (int j = 0; j < EACH; j++) {
        for (int k = 0; k < FOURS; k++) {
            union {
                float4 all;
                float one[4];
            } e;
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
