//! The operations that the kernel needs from an instruction set.

/// Operations on the rows of a group that fit in a register with four bytes each.
///
/// # Safety
///
/// All methods need the instruction set of their type; pointers are valid for the elements they name (no
/// alignment needed).
#[allow(clippy::missing_safety_doc, reason = "one contract for all, above")]
pub unsafe trait BlockKernel {
    /// Rows in a register: 16, or a divisor of 16.
    const ROWS: usize;
    /// True if weights are multiplied as signed bytes, false if as unsigned bytes.
    const SIGNED: bool;
    /// Initial value of sums, chosen so that [`BlockKernel::sums_to_floats`] is cheap.
    const START: i32 = 0;
    /// Four bytes for each row.
    type Bytes: Copy;
    /// An i32 for each row.
    type Sums: Copy;
    /// An f32 for each row.
    type Floats: Copy;

    /// Loads four bytes of each row.
    unsafe fn load(p: *const u8) -> Self::Bytes;
    /// Broadcasts one byte.
    unsafe fn splat_byte(x: u8) -> Self::Bytes;
    unsafe fn and(a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    unsafe fn or(a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    unsafe fn xor(a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    /// Loads sixteen bytes as a table.
    unsafe fn load_table(table: &[u8; 16]) -> Self::Bytes;
    /// Replaces bytes below 16 by those of a table.
    unsafe fn look_up(table: Self::Bytes, a: Self::Bytes) -> Self::Bytes;
    /// Shifts bytes left. Bits of a neighbour may come in.
    unsafe fn shift_left<const N: i32>(a: Self::Bytes) -> Self::Bytes;
    /// Shifts bytes right. Bits of a neighbour may come in.
    unsafe fn shift_right<const N: i32>(a: Self::Bytes) -> Self::Bytes;

    /// Broadcasts one integer to all rows.
    unsafe fn splat_sum(x: i32) -> Self::Sums;
    /// Adds the products of sixteen columns with as many activations to `sums`. Weights are integers of `BITS` bits,
    /// unsigned except for 8 bits if `SIGNED`.
    unsafe fn dot_half_block<const BITS: usize>(
        sums: Self::Sums,
        w: [Self::Bytes; 4],
        q: *const i8,
    ) -> Self::Sums;
    /// Adds the products of 32 columns; see [`BlockKernel::dot_half_block`].
    #[inline(always)]
    unsafe fn dot_block<const BITS: usize>(
        sums: Self::Sums,
        w: [Self::Bytes; 8],
        q: *const i8,
    ) -> Self::Sums {
        let sums = Self::dot_half_block::<BITS>(sums, [w[0], w[1], w[2], w[3]], q);
        Self::dot_half_block::<BITS>(sums, [w[4], w[5], w[6], w[7]], q.add(16))
    }
    /// Converts `sums - START`, below 2^22, to floats.
    unsafe fn sums_to_floats(sums: Self::Sums) -> Self::Floats;

    unsafe fn splat(x: f32) -> Self::Floats;
    unsafe fn load_floats(p: *const f32) -> Self::Floats;
    unsafe fn store(x: Self::Floats, p: *mut f32);
    /// Loads an f16 for each row, widened exactly.
    unsafe fn load_f16(p: *const u8) -> Self::Floats;
    /// Loads an unsigned byte for each row.
    unsafe fn load_u8(p: *const u8) -> Self::Floats;
    /// Loads a signed byte for each row.
    unsafe fn load_i8(p: *const u8) -> Self::Floats;
    /// Loads the low and the high nibble of a byte for each row.
    unsafe fn load_nibbles(p: *const u8) -> [Self::Floats; 2];
    /// Loads a power of two for each row: bytes are the upper bits of an f32 without sign, 0 stands for 2^-127.
    unsafe fn load_exponents(p: *const u8) -> Self::Floats;
    /// Loads a byte for each row, the bits of an f16 from bit 7 on.
    unsafe fn load_minifloats(p: *const u8) -> Self::Floats;
    unsafe fn mul(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `a * b + c`, rounded once.
    unsafe fn fma(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;

    /// Sums sixteen activations.
    unsafe fn sum_bytes(q: *const i8) -> i32;
}
