// Epilogue of `gemm`, for every implementation. Compiled once per step; see gemm.cl.

#define BLOCKS (COLS / 32)
#ifdef STEP_GATE_UP
#define MATRICES FFN_MATRICES
#else
#define MATRICES 1
#endif

// Stores a result as the step requires. `local_row` counts the rows of this chunk.
void store_output(__global float *state, __global float *out, const __global float *bias, int2 chunk, int local_row,
                  int t, float y) {
#ifdef STEP_GATE_UP
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
#if POST_NORMS
    out[(size_t)t * DIM + row] = y;
#else
    ROW(state, t)[row] += SCALED_RESIDUAL(y);
#endif
#endif
#endif
}
