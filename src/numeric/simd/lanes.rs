//! Sixteen f32 lanes, in as many registers as an instruction set needs.
//!
//! Every float sum of the engine uses these lanes in the same order, so all instruction sets give the same bits:
//! element `i` belongs to lane `i % 16`, and the final tree adds lane `j` and lane `j + n/2` for n = 16, 8, 4, 2.

/// Sixteen f32 values.
///
/// # Safety
///
/// All methods need the instruction set of their type; pointers are valid for the sixteen elements
/// they name (no alignment needed).
#[allow(clippy::missing_safety_doc, reason = "one contract for all, above")]
pub unsafe trait Lanes: Copy {
    /// True if the set has registers for twenty or more values of this type.
    const WIDE: bool = false;
    /// True if the set can multiply with one element of a register, so that [`Lanes::fma_one`] costs no more than
    /// [`Lanes::fma`].
    const BY_ELEMENT: bool = false;
    /// Partial sums of the lanes in one register, added in the order of [`Lanes::sum`].
    type PartialSums: Copy;
    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(p: *const f32) -> Self;
    /// Loads sixteen f16, widened exactly.
    unsafe fn load_f16(p: *const u8) -> Self;
    /// Loads sixteen bf16, widened exactly.
    unsafe fn load_bf16(p: *const u8) -> Self;
    /// Loads sixteen signed bytes.
    unsafe fn load_i8(p: *const u8) -> Self;
    /// Loads the low nibbles of sixteen bytes, and their high nibbles.
    unsafe fn load_nibbles(p: *const u8) -> (Self, Self);
    /// Loads `(nibble - 8) * scale` of the low nibbles of sixteen bytes, and of their high nibbles.
    #[inline(always)]
    unsafe fn load_q4(p: *const u8, scale: Self) -> (Self, Self) {
        let ((low, high), eight) = (Self::load_nibbles(p), Self::splat(8.0));
        (low.sub(eight).mul(scale), high.sub(eight).mul(scale))
    }
    /// Broadcasts the finite f16 at `p`, widened exactly.
    ///
    /// Exponent and fraction are shifted into place, then a product with 2^112 corrects the exponent's bias. It is
    /// exact for subnormals too.
    #[inline(always)]
    unsafe fn splat_f16(p: *const u8) -> Self {
        let h = u32::from(u16::from_le_bytes(p.cast::<[u8; 2]>().read()));
        Self::splat(f32::from_bits((h & 0x8000) << 16 | (h & 0x7fff) << 13) * f32::from_bits(0x7780_0000))
    }
    unsafe fn store(self, p: *mut f32);
    /// Rounds to f16 (nearest even) and stores 32 bytes.
    unsafe fn store_f16(self, p: *mut u8);
    /// Converts to i8; values are integers in [-128, 127].
    unsafe fn store_i8(self, p: *mut i8);
    /// Computes `self * b + c`, rounded once.
    unsafe fn fma(self, b: Self, c: Self) -> Self;
    /// Computes `self * b[I] + c` with one of the four floats at `b`, rounded once.
    #[inline(always)]
    unsafe fn fma_one<const I: i32>(self, b: *const f32, c: Self) -> Self {
        self.fma(Self::splat(*b.add(I as usize)), c)
    }
    /// Computes the dot products of four queries with sixteen rows in the order of [`Lanes::sum`], though a zero may
    /// have either sign. Writes sixteen floats per query to `to`. Elements of rows and queries are ordered lane by
    /// lane: 0, 16, 32 and so on, then 1, 17, 33. Only for [`Lanes::BY_ELEMENT`].
    #[inline(always)]
    unsafe fn dots_of_four<const HD: usize>(
        _rows: &[[f32; 16]; HD],
        _queries: &[[f32; 4]; HD],
        _to: [*mut f32; 4],
    ) {
        unreachable!("invariant: the caller has checked BY_ELEMENT")
    }
    unsafe fn add(self, b: Self) -> Self;
    unsafe fn sub(self, b: Self) -> Self;
    unsafe fn mul(self, b: Self) -> Self;
    unsafe fn div(self, b: Self) -> Self;
    /// Larger value of each pair; none is NaN.
    unsafe fn max(self, b: Self) -> Self;
    /// Smaller value of each pair; none is NaN.
    unsafe fn min(self, b: Self) -> Self;
    unsafe fn abs(self) -> Self;
    /// Rounds to the nearest integer, ties to even.
    unsafe fn round(self) -> Self;
    /// Computes `2^n` for integer-valued `n` in [-126, 127] with the exponent bits.
    unsafe fn pow2(n: Self) -> Self;
    /// Selects `self` where `x >= limit`, else +0.
    unsafe fn where_ge(self, x: Self, limit: Self) -> Self;
    /// Adds the lanes by the fixed tree 16 -> 8 -> 4 -> 2 -> 1.
    unsafe fn sum(self) -> f32;

    unsafe fn fold(self) -> Self::PartialSums;
    /// Completes the sums: lane `r` of the result is the sum of row `r`.
    unsafe fn folded_sums(rows: &[Self::PartialSums; 16]) -> Self;

    /// Sums each row: lane `r` of the result is `rows[r].sum()`.
    #[inline(always)]
    unsafe fn sums(rows: &[Self; 16]) -> Self {
        Self::folded_sums(&rows.map(
            #[inline(always)]
            |row| row.fold(),
        ))
    }

    /// Finds the maximum of each row: lane `r` of the result is the largest lane of `rows[r]`.
    #[inline(always)]
    unsafe fn largests(rows: &[Self; 16]) -> Self {
        let mut columns = *rows;
        Self::transpose(&mut columns);
        let mut most = columns[0];
        for column in &columns[1..] {
            most = most.max(*column);
        }
        most
    }

    /// Transposes: lane `i` of row `r` is swapped with lane `r` of row `i`.
    #[inline(always)]
    unsafe fn transpose(rows: &mut [Self; 16]) {
        let mut old = [[0.0f32; 16]; 16];
        for (old, row) in old.iter_mut().zip(rows.iter()) {
            row.store(old.as_mut_ptr());
        }
        for (i, row) in rows.iter_mut().enumerate() {
            let new = old.map(|r| r[i]);
            *row = Self::load(new.as_ptr());
        }
    }

    /// Returns the largest lane.
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        let mut out = [0.0f32; 16];
        self.store(out.as_mut_ptr());
        out.iter().fold(f32::NEG_INFINITY, |m, &x| if x > m { x } else { m })
    }

    /// Loads the first `n < 16` floats at `p`, then zeros.
    #[inline(always)]
    unsafe fn load_part(p: *const f32, n: usize) -> Self {
        let mut part = [0.0f32; 16];
        std::ptr::copy_nonoverlapping(p, part.as_mut_ptr(), n);
        Self::load(part.as_ptr())
    }

    /// Stores the first `n < 16` lanes.
    #[inline(always)]
    unsafe fn store_part(self, p: *mut f32, n: usize) {
        let mut part = [0.0f32; 16];
        self.store(part.as_mut_ptr());
        std::ptr::copy_nonoverlapping(part.as_ptr(), p, n);
    }
}

/// Sixteen lanes in plain Rust, the reference for the other sets.
#[derive(Clone, Copy)]
pub struct Scalar([f32; 16]);

impl Scalar {
    #[inline(always)]
    fn map(self, f: impl Fn(f32) -> f32) -> Self {
        Self(self.0.map(f))
    }

    #[inline(always)]
    fn zip(self, b: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Self(std::array::from_fn(|i| f(self.0[i], b.0[i])))
    }
}

// SAFETY: needs no instruction set beyond the target's baseline.
unsafe impl Lanes for Scalar {
    type PartialSums = f32;
    #[inline(always)]
    unsafe fn fold(self) -> f32 {
        self.sum()
    }
    #[inline(always)]
    unsafe fn folded_sums(rows: &[f32; 16]) -> Self {
        Self(*rows)
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Self([x; 16])
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        Self(p.cast::<[f32; 16]>().read_unaligned())
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> Self {
        let bytes = p.cast::<[[u8; 2]; 16]>().read_unaligned();
        Self(bytes.map(|b| half::f16::from_le_bytes(b).to_f32()))
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self {
        let bytes = p.cast::<[[u8; 2]; 16]>().read_unaligned();
        Self(bytes.map(|b| half::bf16::from_le_bytes(b).to_f32()))
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> Self {
        let bytes = p.cast::<[u8; 16]>().read_unaligned();
        Self(bytes.map(|b| b as i8 as f32))
    }
    #[inline(always)]
    unsafe fn load_nibbles(p: *const u8) -> (Self, Self) {
        let bytes = p.cast::<[u8; 16]>().read_unaligned();
        (Self(bytes.map(|b| (b & 15) as f32)), Self(bytes.map(|b| (b >> 4) as f32)))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        p.cast::<[f32; 16]>().write_unaligned(self.0)
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u8) {
        p.cast::<[[u8; 2]; 16]>().write(self.0.map(|x| half::f16::from_f32(x).to_le_bytes()))
    }
    #[inline(always)]
    unsafe fn store_i8(self, p: *mut i8) {
        p.cast::<[i8; 16]>().write_unaligned(self.0.map(|x| x as i8))
    }
    #[inline(always)]
    unsafe fn fma(self, b: Self, c: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i].mul_add(b.0[i], c.0[i])))
    }
    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        self.zip(b, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        self.zip(b, |a, b| a - b)
    }
    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        self.zip(b, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn div(self, b: Self) -> Self {
        self.zip(b, |a, b| a / b)
    }
    #[inline(always)]
    unsafe fn max(self, b: Self) -> Self {
        self.zip(b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    unsafe fn min(self, b: Self) -> Self {
        self.zip(b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    unsafe fn abs(self) -> Self {
        self.map(f32::abs)
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        self.map(f32::round_ties_even)
    }
    #[inline(always)]
    unsafe fn pow2(n: Self) -> Self {
        n.map(|n| f32::from_bits(((n as i32 + 127) as u32) << 23))
    }
    #[inline(always)]
    unsafe fn where_ge(self, x: Self, limit: Self) -> Self {
        Self(std::array::from_fn(|i| if x.0[i] >= limit.0[i] { self.0[i] } else { 0.0 }))
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        let mut v = self.0;
        let mut n = 8;
        while n > 0 {
            for j in 0..n {
                v[j] += v[j + n];
            }
            n /= 2;
        }
        v[0]
    }
}
