//! Plain Rust for the vectors that CPUs have.

/// Runs plain Rust, compiled for wider vectors where the CPU has them: for loops that need no kernels of their own.
/// `f` is an `#[inline(always)]` closure. Rust joins no operations of its own accord, so results are the same.
#[inline(always)]
pub fn widely<T>(f: impl FnOnce() -> T) -> T {
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
