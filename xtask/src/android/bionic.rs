//! Public symbols of Android's C library that a program may import: those that Rust's standard library and
//! the crates of this project use, and their usual neighbours. Each was looked up in AOSP's `libc.map.txt`,
//! `libm.map.txt` and `libdl.map.txt`; all are there from API level 24 on, but for [`LATER`].

use crate::targets::ANDROID_API;

/// A library of bionic and the names it is known for here.
pub struct Library {
    pub name: &'static str,
    functions: &'static str,
    variables: &'static str,
}

pub const LIBRARIES: &[Library] = &[
    Library { name: "libc.so", functions: LIBC, variables: "environ stderr stdin stdout" },
    Library { name: "libm.so", functions: LIBM, variables: "signgam" },
    Library { name: "libdl.so", functions: LIBDL, variables: "" },
];

/// Functions of libc newer than API level 24, with their level. A program may import them weakly, which
/// means: do without if they are missing.
pub const LATER: &[(&str, u32)] = &[
    ("aligned_alloc", 28),
    ("copy_file_range", 34),
    ("getentropy", 28),
    ("getrandom", 28),
    ("glob", 28),
    ("iconv", 28),
    ("memfd_create", 30),
    ("posix_spawn", 28),
    ("pthread_getname_np", 26),
    ("statx", 30),
    ("syncfs", 28),
];

const LIBC: &str = "
    __assert __assert2 __cmsg_nxthdr __cxa_atexit __cxa_finalize __cxa_thread_atexit_impl __errno
    __FD_CLR_chk __FD_ISSET_chk __FD_SET_chk __fgets_chk __fread_chk __fwrite_chk __getcwd_chk
    __gnu_strerror_r __libc_init __memchr_chk __memcpy_chk __memmove_chk __memrchr_chk __memset_chk __open_2
    __openat_2 __poll_chk __ppoll_chk __pread64_chk __pread_chk __pwrite64_chk __pwrite_chk __read_chk
    __readlink_chk __readlinkat_chk __recvfrom_chk __register_atfork __snprintf_chk __sprintf_chk
    __stack_chk_fail __stpcpy_chk __stpncpy_chk __strcat_chk __strchr_chk __strcpy_chk __strlcat_chk
    __strlcpy_chk __strlen_chk __strncat_chk __strncpy_chk __strrchr_chk __system_property_get __umask_chk
    __vsnprintf_chk __vsprintf_chk __write_chk _longjmp _setjmp android_set_abort_message arc4random
    arc4random_buf
    _exit _Exit abort accept accept4 access alarm asprintf atof atoi atol atoll
    basename bind brk bsearch btowc
    calloc chdir chmod chown chroot clearenv clock clock_getres clock_gettime clock_nanosleep clock_settime
    clone close closedir closelog connect creat ctime ctime_r
    daemon difftime dirfd dirname div dprintf drand48 dup dup2 dup3
    epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_wait err errx eventfd eventfd_read
    eventfd_write execl execle execlp execv execve execvp execvpe exit
    faccessat fallocate fallocate64 fchdir fchmod fchmodat fchown fchownat fclose fcntl fdatasync fdopen
    fdopendir feof ferror fflush ffs fgetc fgetpos fgets fileno flock fnmatch fopen fork fpathconf fprintf
    fputc fputs fread free freeaddrinfo freopen fscanf fseek fseeko fsetpos fstat fstat64 fstatat fstatat64
    fstatfs fstatfs64 fstatvfs fstatvfs64 fsync ftell ftello ftruncate ftruncate64 futimens fwrite
    gai_strerror getaddrinfo getauxval getc getchar getcwd getdelim getegid getenv geteuid getgid getgrgid
    getgrgid_r getgrnam getgroups gethostbyname gethostname getitimer getline getnameinfo getopt getopt_long
    getpagesize getpeername getpgid getpgrp getpid getppid getpriority getprogname getpwnam getpwnam_r
    getpwuid getpwuid_r getresgid getresuid getrlimit getrlimit64 getrusage getservbyname getsid
    getsockname getsockopt gettid gettimeofday getuid getxattr gmtime gmtime_r
    if_indextoname if_nametoindex inet_aton inet_ntoa inet_ntop inet_pton initgroups inotify_add_watch
    inotify_init inotify_init1 inotify_rm_watch ioctl isalnum isalpha isascii isatty isblank iscntrl isdigit
    isgraph islower isprint ispunct isspace isupper iswalpha iswdigit iswspace isxdigit
    kill killpg
    labs lchown ldexp lgetxattr link linkat listen listxattr llabs localeconv localtime localtime_r longjmp
    lrand48 lseek lseek64 lstat lstat64
    madvise malloc malloc_usable_size mbrtowc mbstowcs mbtowc memalign memccpy memchr memcmp memcpy memmem
    memmove mempcpy memrchr memset mincore mkdir mkdirat mkdtemp mkfifo mknod mkstemp mkstemp64 mktime mlock
    mlockall mmap mmap64 mount mprotect mrand48 mremap msync munlock munlockall munmap
    nanosleep newlocale nice
    open open64 open_memstream openat openat64 opendir openlog
    pathconf pause pclose perror personality pipe pipe2 poll popen posix_fadvise posix_fadvise64
    posix_fallocate posix_fallocate64 posix_madvise posix_memalign posix_openpt ppoll prctl pread pread64
    preadv preadv64 printf prlimit prlimit64 process_vm_readv pselect psignal
    pthread_atfork pthread_attr_destroy pthread_attr_getdetachstate pthread_attr_getguardsize
    pthread_attr_getstack pthread_attr_getstacksize pthread_attr_init pthread_attr_setdetachstate
    pthread_attr_setguardsize pthread_attr_setschedparam pthread_attr_setschedpolicy pthread_attr_setstack
    pthread_attr_setstacksize pthread_cond_broadcast pthread_cond_destroy pthread_cond_init
    pthread_cond_signal pthread_cond_timedwait pthread_cond_wait pthread_condattr_destroy
    pthread_condattr_getclock pthread_condattr_init pthread_condattr_setclock pthread_create pthread_detach
    pthread_equal pthread_exit pthread_getattr_np pthread_getcpuclockid pthread_getschedparam
    pthread_getspecific pthread_gettid_np pthread_join pthread_key_create pthread_key_delete pthread_kill
    pthread_mutex_destroy pthread_mutex_init pthread_mutex_lock pthread_mutex_timedlock
    pthread_mutex_trylock pthread_mutex_unlock pthread_mutexattr_destroy pthread_mutexattr_init
    pthread_mutexattr_settype pthread_once pthread_rwlock_destroy pthread_rwlock_init pthread_rwlock_rdlock
    pthread_rwlock_tryrdlock pthread_rwlock_trywrlock pthread_rwlock_unlock pthread_rwlock_wrlock
    pthread_self pthread_setname_np pthread_setschedparam pthread_setspecific pthread_sigmask
    ptrace ptsname_r putc putchar putenv puts pwrite pwrite64 pwritev pwritev64
    qsort
    raise rand rand_r random read readahead readdir readdir64 readdir64_r readdir_r readlink readlinkat readv
    realloc realpath recv recvfrom recvmmsg recvmsg regcomp regexec regfree remove rename renameat rewind
    rewinddir rmdir
    sbrk scandir sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getcpu
    sched_getparam sched_getscheduler sched_setaffinity sched_setparam sched_setscheduler sched_yield
    select sem_destroy sem_getvalue sem_init sem_post sem_timedwait sem_trywait sem_wait send sendfile
    sendfile64 sendmmsg sendmsg sendto setbuf setegid setenv seteuid setgid setgroups setitimer setjmp
    setlocale setns setpgid setpriority setregid setresgid setresuid setreuid setrlimit setrlimit64 setsid
    setsockopt setuid setvbuf setxattr shutdown sigaction sigaddset sigaltstack sigdelset sigemptyset
    sigfillset sigismember siglongjmp signal signalfd sigpending sigprocmask sigsetjmp sigsuspend
    sigtimedwait sigwait sigwaitinfo sleep snprintf socket socketpair splice sprintf srand srand48 srandom
    sscanf stat stat64 statfs statfs64 statvfs statvfs64 stpcpy stpncpy strcasecmp strcasestr strcat strchr
    strcmp strcoll strcpy strcspn strdup strerror strerror_r strftime strlcat strlcpy strlen strncasecmp
    strncat strncmp strncpy strndup strnlen strpbrk strptime strrchr strsep strsignal strspn strstr strtod
    strtof strtoimax strtok strtok_r strtol strtold strtoll strtoul strtoull strtoumax strxfrm symlink
    symlinkat sync sysconf sysinfo syscall syslog system
    tcdrain tcflush tcgetattr tcgetpgrp tcsetattr tcsetpgrp tdelete tee tfind time timegm timer_create
    timer_delete timer_gettime timer_settime timerfd_create timerfd_gettime timerfd_settime times tmpfile
    toascii tolower toupper towlower towupper truncate truncate64 tsearch ttyname ttyname_r tzset
    umask umount2 uname ungetc unlink unlinkat unshare unsetenv uselocale usleep utime utimensat utimes
    vasprintf vdprintf vfork vfprintf vmsplice vprintf vsnprintf vsprintf vsscanf
    wait wait4 waitid waitpid wcrtomb wcslen wcstombs wctomb wmemchr wmemcpy write writev";

const LIBM: &str = "
    acos acosf acosh acoshf asin asinf asinh asinhf atan atan2 atan2f atanf atanh atanhf cbrt cbrtf ceil ceilf
    copysign copysignf cos cosf cosh coshf erf erfc erfcf erff exp exp2 exp2f expf expm1 expm1f fabs fabsf
    fdim fdimf floor floorf fma fmaf fmax fmaxf fmin fminf fmod fmodf frexp frexpf hypot hypotf ilogb ilogbf
    ldexpf lgamma lgamma_r lgammaf lgammaf_r llrint llrintf llround llroundf log log10 log10f log1p log1pf
    log2 log2f logb logbf logf lrint lrintf lround lroundf modf modff nearbyint nearbyintf nextafter
    nextafterf pow powf remainder remainderf remquo remquof rint rintf round roundf scalbln scalblnf scalbn
    scalbnf sin sincos sincosf sinf sinh sinhf sqrt sqrtf tan tanf tanh tanhf tgamma tgammaf trunc truncf";

const LIBDL: &str = "
    android_dlopen_ext dl_iterate_phdr dladdr dlclose dlerror dlopen dlsym dlvsym";

impl Library {
    pub fn functions(&self) -> impl Iterator<Item = &'static str> {
        self.functions.split_whitespace()
    }

    pub fn variables(&self) -> impl Iterator<Item = &'static str> {
        self.variables.split_whitespace()
    }
}

/// The API level a public symbol came with, where 24 stands for that and all before.
pub fn level(symbol: &str) -> Option<u32> {
    let later = LATER.iter().find(|(name, _)| *name == symbol).map(|(_, level)| *level);
    let early = || LIBRARIES.iter().any(|l| l.functions().chain(l.variables()).any(|name| name == symbol));
    later.or_else(|| early().then_some(ANDROID_API))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn no_symbol_is_listed_twice() {
        let mut seen = HashSet::new();
        let early = LIBRARIES.iter().flat_map(|l| l.functions().chain(l.variables()));
        for name in early.chain(LATER.iter().map(|(name, _)| *name)) {
            assert!(seen.insert(name), "{name}");
            assert!(name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_'), "{name}");
        }
        assert!(LATER.iter().all(|(_, level)| *level > ANDROID_API));
    }

    #[test]
    fn levels_of_symbols() {
        assert_eq!(level("malloc"), Some(24));
        assert_eq!(level("environ"), Some(24));
        assert_eq!(level("tanhf"), Some(24));
        assert_eq!(level("dlsym"), Some(24));
        assert_eq!(level("getrandom"), Some(28));
        // Those of other C libraries, and of no library.
        for name in ["__errno_location", "gnu_get_libc_version", "__libc_start_main", ""] {
            assert_eq!(level(name), None, "{name}");
        }
    }
}
