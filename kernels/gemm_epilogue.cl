// Epilogue of `gemm`, for every implementation. Compiled once per step; see gemm.cl.

#define BLOCKS (COLS / 32)
#ifdef STEP_GATE_UP
#define MATRICES FFN_MATRICES
#else
#define MATRICES 1
#endif

#ifdef CHOSEN
// An expert's part of the matrix, for the tokens that have chosen it: see experts.cl. The input of gate_up has a row for
// each token, that of down and the results have one for each choice. A launch has a tile of tokens of each expert.
#define EXPERT_GROUPS (ROWS / 16)
#define SORTED_CHOICES const __global int *sorted,
#define CHUNK_OF(part) (int2)(expert, 0)
#define CHOICE_AT(i) sorted[EXPERTS + 1 + list + (i)]
#ifdef STEP_GATE_UP
#define INPUT_AT(i) (CHOICE_AT(i) / USED)
#else
#define INPUT_AT(i) CHOICE_AT(i)
#endif
// Group in the buffer, where the groups of `up` follow those of `gate` of all its experts.
#define SOURCE_GROUP(g, part) (first_group + (g) % EXPERT_GROUPS + (g) / EXPERT_GROUPS * (part).y)
// Other buffers have other experts, and most experts fewer tokens than there are.
#define SELECT_PART(tile_tokens)                                                                       \
    int expert = TOKEN_TILE(part) % EXPERTS, first_token = TOKEN_TILE(part) / EXPERTS * (tile_tokens); \
    int list = sorted[expert], end = sorted[expert + 1] - list, groups = EXPERT_GROUPS * MATRICES;     \
    int first_group = expert * EXPERT_GROUPS - part.x;                                                 \
    bool has_work = first_token < end && first_group >= 0 && first_group < part.y;                     \
    end = has_work ? end : 0;
#else
#define SORTED_CHOICES
#define CHUNK_OF(part) (part).xy
#define CHOICE_AT(i) (i)
#define INPUT_AT(i) (i)
#define SOURCE_GROUP(g, part) (g)
#define SELECT_PART(tile_tokens) \
    int first_token = TOKEN_TILE(part) * (tile_tokens), end = part.z, groups = part.y * MATRICES; \
    const bool has_work = true;
#endif

// Stores a result as the step requires. `local_row` counts the rows of this chunk, or of the expert that is given.
void store_output(__global float *state, __global float *out, const __global float *bias, int2 chunk, int local_row,
                  int t, float y) {
#ifdef CHOSEN
    if (local_row >= MATRICES * ROWS) return;
#if defined(STEP_DOWN) && EXPERT_BIAS
    y += bias[chunk.x * ROWS + local_row];
#endif
    out[(size_t)t * (MATRICES * ROWS) + local_row] = y;
#elif defined(STEP_GATE_UP)
    int rows = chunk.y * 16;
    int row = local_row < rows ? local_row : local_row - rows;
    int column = chunk.x * 16 + row + (local_row < rows ? 0 : FFN_PAD);
    if (local_row < FFN_MATRICES * rows) out[(size_t)t * (FFN_MATRICES * FFN_PAD) + column] = y;
#else
    int row = chunk.x * 16 + local_row;
    if (local_row >= chunk.y * 16 || row >= ROWS) return;
#if defined(STEP_QKV)
#if QKV_BIAS
    y += bias[row];
#endif
    out[(size_t)t * QKV + QKV_COLUMN(row)] = y;
#elif defined(STEP_MIX) || defined(STEP_PROJECT)
    out[(size_t)t * ROWS + row] = y;
#elif defined(STEP_HEAD)
    out[(size_t)t * VOCAB + row] = SCALED_LOGIT(y);
#else
#if (defined(STEP_OUT) && O_BIAS) || (defined(STEP_DOWN) && MLP_BIAS)
    y += bias[row];
#endif
#if POST_NORMS || defined(PRODUCTS)
    out[(size_t)t * DIM + row] = y;
#else
    ROW(state, t)[row] += SCALED_RESIDUAL(y);
#endif
#endif
#endif
}
