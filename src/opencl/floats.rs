//! Floats as the bytes that buffers hold. Host and device of every OpenCL platform in use are little endian.

/// The bytes of `x`.
pub fn bytes(x: &[f32]) -> &[u8] {
    // SAFETY: the same memory, as long as `x`; every byte of a float is initialised and bytes need no alignment.
    unsafe { std::slice::from_raw_parts(x.as_ptr().cast(), size_of_val(x)) }
}

/// The bytes of `x`, for writing.
pub fn bytes_mut(x: &mut [f32]) -> &mut [u8] {
    // SAFETY: as above; any four bytes are a float.
    unsafe { std::slice::from_raw_parts_mut(x.as_mut_ptr().cast(), size_of_val(x)) }
}
