//! Compiles plain Rust for AVX2.

/// Runs `f` compiled for AVX2 if the CPU has it: for loops that need no hand-written kernel. `f` must be an
/// `#[inline(always)]` closure. The results are the same, since Rust never fuses operations by itself.
#[inline(always)]
pub fn with_avx2<T>(f: impl FnOnce() -> T) -> T {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2,f16c")]
        fn avx2<T>(f: impl FnOnce() -> T) -> T {
            f()
        }
        if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("f16c") {
            // SAFETY: the CPU has both features.
            return unsafe { avx2(f) };
        }
    }
    f()
}
