package androidx.annotation;

/** Tells Kotlin that a value may be null. Only its name is in the package, which needs no library for it. */
public @interface Nullable {}
