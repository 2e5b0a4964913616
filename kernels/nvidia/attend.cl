// Attention of decode.cl: loading cache rows, scores, softmax and weighted sums, in the same order as attend_one.cl.

#define LANES (HEAD_DIM / 8) // lanes that share a row, eight elements each
#define ROWS_PER_SWEEP (WARPS * 32 / LANES) // rows read by a work-group at once
#define SWEEPS (CHUNK / ROWS_PER_SWEEP)
// Pitch of rows in local memory, and their number at once, as floats.
#define STAGE_ROW (HEAD_DIM + 4)
#define STAGED_ROWS MIN_OF(CHUNK, HEAD_DIM <= 64 ? CHUNK : HEAD_DIM <= 128 ? 64 : 32)
// Slots for a chunk of attention: sums of values, largest score, sum of weights.
#define SLOTS_PER_PART CEIL_DIV(HEAD_DIM + 2, 3)
#define PARTS_AT_ONCE MIN_OF(64, PARTS / (3 * SLOTS_PER_PART))

// Eight elements of a row as stored.
typedef struct {
    uint4 a, b;
    float scale;
} Piece;

// Index of the first of the eight elements, and distance to the second four: a byte of q4 holds elements z and z + 16.
#define FIRST_ELEMENT(type, l) ((type) == T_Q4 ? (l) / 4 * 32 + (l) % 4 * 4 : (l) * 8)
#define SECOND_OFFSET(type) ((type) == T_Q4 ? 16 : 4)

Piece load_piece(int type, const __global uchar *row, uint l) {
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

float8 piece_elements(int type, Piece p) {
    if (type == T_F32) return (float8)(as_float4(p.a), as_float4(p.b));
    if (type == T_F16)
        return (float8)(unpack_halves(p.a.x), unpack_halves(p.a.y), unpack_halves(p.a.z), unpack_halves(p.a.w));
    if (type == T_Q8) return convert_float8(as_char8(p.a.xy)) * p.scale;
    char8 q = as_char8((uint2)(p.a.x & 0x0f0f0f0fu, (p.a.x >> 4) & 0x0f0f0f0fu));
    return (convert_float8(q) - 8.0f) * p.scale;
}

// Starts loading a chunk's rows of a KV head; past the end the last row is repeated.
void load_rows(int type, Piece *p, const __global uchar *rows, uint row_bytes, uint count) {
    const uint lid = hidden_local_id();
    for (uint i = 0; i < SWEEPS; i++) {
        uint row = min(i * ROWS_PER_SWEEP + lid / LANES, count - 1);
        p[i] = load_piece(type, rows + row * row_bytes, lid % LANES);
    }
}

// Stores rows from `from` on in local memory. Row `newest` is available as floats.
void stage_rows(int type, const Piece *p, uint from, uint newest, const __local float *row_of_newest, __local float *rows) {
    const uint lid = hidden_local_id(), l = lid % LANES;
#pragma unroll
    for (uint i = 0; i < SWEEPS; i++) {
        uint row = i * ROWS_PER_SWEEP + lid / LANES;
        if (i * ROWS_PER_SWEEP / STAGED_ROWS != from / STAGED_ROWS || row == newest) continue;
        float8 e = piece_elements(type, p[i]);
        __local float *to = rows + (row - from) * STAGE_ROW + FIRST_ELEMENT(type, l);
        *(__local float4 *)to = e.lo;
        *(__local float4 *)(to + SECOND_OFFSET(type)) = e.hi;
    }
    if (newest - from < STAGED_ROWS)
        for (uint d = lid; d < HEAD_DIM; d += WG) rows[(newest - from) * STAGE_ROW + d] = row_of_newest[d];
    barrier(CLK_LOCAL_MEM_FENCE);
}

float score(const __local float *row, const __local float *query) {
    const __local float4 *k = (const __local float4 *)row, *q = (const __local float4 *)query;
    float4 acc[4];
    for (uint j = 0; j < 4; j++) acc[j] = 0.0f;
#pragma unroll
    for (uint i = 0; i < HEAD_DIM / 16; i++)
        for (uint j = 0; j < 4; j++) acc[j] = fma(k[i * 4 + j], q[i * 4 + j], acc[j]);
    float4 sum = (acc[0] + acc[2]) + (acc[1] + acc[3]);
    float2 two = sum.lo + sum.hi;
    return two.x + two.y;
}

// Adds values of one element times their weights; both may be read to the end of the chunk.
float weighted_sum(const __local float *weights, const __local float *values, uint count, float acc) {
    const __local float4 *w = (const __local float4 *)weights;
    float4 next[PREFETCHED_STEPS / 4];
    float value[PREFETCHED_STEPS];
    for (uint k = 0; k < PREFETCHED_STEPS / 4; k++) next[k] = w[k];
    for (uint k = 0; k < PREFETCHED_STEPS; k++) value[k] = values[k * STAGE_ROW];
#pragma unroll 2
    for (uint t = 0; t < count; t += PREFETCHED_STEPS) {
        float4 now[PREFETCHED_STEPS / 4];
        float its[PREFETCHED_STEPS];
        const uint then = min(t + PREFETCHED_STEPS, (uint)STAGED_ROWS - PREFETCHED_STEPS);
        for (uint k = 0; k < PREFETCHED_STEPS / 4; k++) now[k] = next[k];
        for (uint k = 0; k < PREFETCHED_STEPS; k++) its[k] = value[k];
        for (uint k = 0; k < PREFETCHED_STEPS / 4; k++) next[k] = w[then / 4 + k];
        for (uint k = 0; k < PREFETCHED_STEPS; k++) value[k] = values[(then + k) * STAGE_ROW];
        for (uint k = 0; k < PREFETCHED_STEPS; k++) {
            float of = k % 4 == 0 ? now[k / 4].x : k % 4 == 1 ? now[k / 4].y : k % 4 == 2 ? now[k / 4].z : now[k / 4].w;
            // Weights past the end are 0, but their values may be NaN.
            if (t + k < count) acc = fma(of, its[k], acc);
        }
    }
    return acc;
}

// Rounds a row to what it decodes to after encoding with these scales; floats need none.
void round_to_stored(int type, __local float *x, const __local float2 *scales) {
    for (uint i = get_local_id(0); i < HEAD_DIM; i += WG) {
        float2 scale = scales[i / KV_BLOCK * CANDIDATES];
        if (type == T_F16) {
            ushort bits;
            vstore_half_rte(x[i], 0, (__private half *)&bits);
            x[i] = from_half(bits);
        } else if (type == T_Q8) {
            x[i] = clamp(rint(x[i] * scale.y), -127.0f, 127.0f) * scale.x;
        } else if (type == T_Q4) {
            x[i] = clamp(rint(x[i] * scale.y), -8.0f, 7.0f) * scale.x;
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
}

// Turns the scores of one query into weights; returns the largest score and the sum of the weights. Run by one warp.
float2 softmax_chunk(__local float *p, uint count) {
    const uint lane = get_local_id(0) % 32;
    float e[CHUNK / 32], most = LOWEST_SCORE, sum = 0.0f;
    for (uint i = 0; i < CHUNK / 32; i++) {
        e[i] = i * 32 + lane < count ? p[i * 32 + lane] : LOWEST_SCORE;
        most = fmax(most, e[i]);
    }
    most = warp_max(most);
    for (uint i = 0; i < CHUNK / 32; i++) {
        e[i] = i * 32 + lane < count ? exp_approx(e[i] - most) : 0.0f;
        p[i * 32 + lane] = e[i];
        // Sixteen lanes add every sixteenth weight.
        sum += e[i];
        sum += shuffle_xor(e[i], 16);
    }
    for (uint m = 8; m > 0; m /= 2) sum += shuffle_xor(sum, m);
    return (float2)(most, sum);
}
