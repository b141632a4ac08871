// Allows shared libraries that are built on a newer system to be loaded with
// glibc 2.28 and the libstdc++ of GCC 8.
//
// glibc 2.34 moved the functions of libpthread and libdl into libc and gave
// them new symbol versions. A library that is linked with glibc 2.34 requires
// the new versions. Each function below replaces one of these functions inside
// a shared library, and calls the oldest version of the same function, which
// every glibc of the architecture has. The replacements are hidden, so that
// other libraries do not use them.

#include <errno.h>

// <errno.h> defines __GLIBC__.
#if (defined(__x86_64__) || defined(__aarch64__)) && defined(__GLIBC__)
#include <pthread.h>
#include <time.h>

#include <new>

#define LAYOUTMAP_HIDDEN extern "C" __attribute__((visibility("hidden")))
// The first version of glibc that supported the architecture.
#if defined(__x86_64__)
#define LAYOUTMAP_FIRST_GLIBC "2.2.5"
#else
#define LAYOUTMAP_FIRST_GLIBC "2.17"
#endif
#define LAYOUTMAP_OLD(name)                         \
  __asm__(".symver layoutmap_old_" #name ", " #name \
          "@GLIBC_" LAYOUTMAP_FIRST_GLIBC)

LAYOUTMAP_OLD(dlsym);
LAYOUTMAP_OLD(log);
LAYOUTMAP_OLD(pthread_mutex_trylock);
LAYOUTMAP_OLD(pthread_once);
LAYOUTMAP_OLD(pthread_rwlock_rdlock);
LAYOUTMAP_OLD(pthread_rwlock_unlock);
LAYOUTMAP_OLD(pthread_rwlock_wrlock);

extern "C" {
void* layoutmap_old_dlsym(void* handle, const char* name);
double layoutmap_old_log(double x);
int layoutmap_old_pthread_mutex_trylock(pthread_mutex_t* mutex);
int layoutmap_old_pthread_once(pthread_once_t* once, void (*function)());
int layoutmap_old_pthread_rwlock_rdlock(pthread_rwlock_t* lock);
int layoutmap_old_pthread_rwlock_unlock(pthread_rwlock_t* lock);
int layoutmap_old_pthread_rwlock_wrlock(pthread_rwlock_t* lock);
}

// glibc 2.32 introduced this variable. libstdc++ reads it to avoid atomic
// operations in processes with one thread. If the value is 0, libstdc++ always
// uses atomic operations.
LAYOUTMAP_HIDDEN char __libc_single_threaded;
char __libc_single_threaded = 0;

LAYOUTMAP_HIDDEN void* dlsym(void* handle, const char* name) noexcept {
  return layoutmap_old_dlsym(handle, name);
}

// The compiler ignores the visibility of a function with the name `log`,
// because it is a builtin. The function therefore has another name in C++.
LAYOUTMAP_HIDDEN double layoutmap_log(double x) __asm__("log");
double layoutmap_log(double x) { return layoutmap_old_log(x); }

LAYOUTMAP_HIDDEN int pthread_mutex_trylock(pthread_mutex_t* mutex) noexcept {
  return layoutmap_old_pthread_mutex_trylock(mutex);
}

LAYOUTMAP_HIDDEN int pthread_once(pthread_once_t* once, void (*function)()) {
  return layoutmap_old_pthread_once(once, function);
}

LAYOUTMAP_HIDDEN int pthread_rwlock_rdlock(pthread_rwlock_t* lock) noexcept {
  return layoutmap_old_pthread_rwlock_rdlock(lock);
}

LAYOUTMAP_HIDDEN int pthread_rwlock_unlock(pthread_rwlock_t* lock) noexcept {
  return layoutmap_old_pthread_rwlock_unlock(lock);
}

LAYOUTMAP_HIDDEN int pthread_rwlock_wrlock(pthread_rwlock_t* lock) noexcept {
  return layoutmap_old_pthread_rwlock_wrlock(lock);
}

// glibc 2.30 added this function. This version converts the deadline to the
// real-time clock, as libstdc++ did before GCC 10. If the real-time clock is
// changed during the wait, the wait ends too early or too late. This is
// acceptable, because callers check their condition and their own clock again.
LAYOUTMAP_HIDDEN int pthread_cond_clockwait(pthread_cond_t* condition,
                                            pthread_mutex_t* mutex,
                                            clockid_t clock,
                                            const timespec* deadline) {
  timespec now, real;
  if (clock_gettime(clock, &now) != 0 ||
      clock_gettime(CLOCK_REALTIME, &real) != 0) {
    return EINVAL;
  }
  constexpr long kNanoseconds = 1000000000;
  timespec until;
  // Maximum wait of about 30 years, which ensures that the sum below cannot
  // overflow.
  constexpr time_t kMaxSeconds = 1000000000;
  time_t seconds = deadline->tv_sec - now.tv_sec;
  if (seconds > kMaxSeconds) seconds = kMaxSeconds;
  until.tv_sec = real.tv_sec + seconds;
  until.tv_nsec = real.tv_nsec + deadline->tv_nsec - now.tv_nsec;
  if (until.tv_nsec >= kNanoseconds) {
    until.tv_nsec -= kNanoseconds;
    ++until.tv_sec;
  } else if (until.tv_nsec < 0) {
    until.tv_nsec += kNanoseconds;
    --until.tv_sec;
  }
  return pthread_cond_timedwait(condition, mutex, &until);
}

// The functions below replace newer symbols of libstdc++. They are declared
// with their mangled names, because the symbols belong to namespace std.

// GCC 11 added this function. The expression `new T[n]` calls it if `n` is
// negative.
LAYOUTMAP_HIDDEN void layoutmap_throw_bad_array_new_length() __asm__(
    "_ZSt28__throw_bad_array_new_lengthv");
void layoutmap_throw_bad_array_new_length() {
  throw std::bad_array_new_length();
}

// GCC 11 made the copy constructor and the destructor of std::exception_ptr
// inline functions that call _M_addref and _M_release. Every version of
// libstdc++ also exports a copy constructor and a destructor, and the
// replacements below call these.
__asm__(
    ".symver layoutmap_old_copy_exception, "
    "_ZNSt15__exception_ptr13exception_ptrC1ERKS0_@CXXABI_1.3.3");
__asm__(
    ".symver layoutmap_old_destroy_exception, "
    "_ZNSt15__exception_ptr13exception_ptrD1Ev@CXXABI_1.3.3");
extern "C" void layoutmap_old_copy_exception(void** copy, void* const* from);
extern "C" void layoutmap_old_destroy_exception(void** exception);

LAYOUTMAP_HIDDEN void layoutmap_add_reference(void** exception) __asm__(
    "_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
void layoutmap_add_reference(void** exception) {
  // The copy is never destroyed, so the reference count stays incremented.
  void* copy;
  layoutmap_old_copy_exception(&copy, exception);
}

LAYOUTMAP_HIDDEN void layoutmap_release(void** exception) __asm__(
    "_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");
void layoutmap_release(void** exception) {
  layoutmap_old_destroy_exception(exception);
  *exception = nullptr;
}

#endif  // __GLIBC__
