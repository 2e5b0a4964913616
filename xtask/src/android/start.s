// The object a program starts in. Bionic's __libc_init(stack, _, main, arrays) runs main; the arrays are for
// destructors of C++ and stay empty, in any of the layouts that bionic has had.
.text
.globl _start
.type _start, %function
_start:
    mov x29, #0
    mov x30, #0
    mov x0, sp
    mov x1, #0
    adrp x2, :got:main
    ldr x2, [x2, :got_lo12:main]
    adrp x3, .Larrays
    add x3, x3, :lo12:.Larrays
    b __libc_init
.data
.balign 8
.globl __dso_handle
.hidden __dso_handle
__dso_handle: .xword __dso_handle
.bss
.balign 8
.Larrays: .zero 64
// Which API level is needed.
.section .note.android.ident, "a", %note
.balign 4
    .word 8
    .word 4
    .word 1
    .asciz "Android"
    .word {API}
