//! The native methods of `xtask/android/org/antigravity/Model.java`: functions of the C API for Java. Texts are arrays
//! of bytes, as Java's own UTF-8 is another one; what is written comes in an array of `long`.
//!
//! Java passes an environment, a table of functions that are valid on this thread during the call.

use super::engine::{
    EngineHandle, antigravity_free, antigravity_last_error, antigravity_load, antigravity_load_fd,
    antigravity_model_info,
};
use super::session::{
    PieceCallback, SessionHandle, TextResult, antigravity_cancel, antigravity_chat, antigravity_generate,
    antigravity_session_free, antigravity_session_load, antigravity_session_new, antigravity_session_save,
};
use std::ffi::{CStr, c_char, c_void};
use std::ptr::{null, null_mut, without_provenance_mut};

/// Reference to a Java object; null is Java's.
type JavaObject = *mut c_void;

// Places of functions in the table, which the JNI specification fixes.
const DELETE_LOCAL_REF: usize = 23;
const GET_OBJECT_CLASS: usize = 31;
const GET_METHOD_ID: usize = 33;
const CALL_INT_METHOD_A: usize = 51;
const GET_ARRAY_LENGTH: usize = 171;
const NEW_BYTE_ARRAY: usize = 176;
const GET_BYTE_ARRAY_REGION: usize = 200;
const SET_BYTE_ARRAY_REGION: usize = 208;
const SET_LONG_ARRAY_REGION: usize = 212;
const EXCEPTION_CHECK: usize = 228;

/// Environment of a native method.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct JavaEnv(*const *const c_void);

/// A text from Java.
struct JavaText(Option<Vec<u8>>);

impl JavaText {
    fn as_ptr(&self) -> *const c_char {
        self.0.as_ref().map_or(null(), |bytes| bytes.as_ptr().cast())
    }

    fn len(&self) -> usize {
        self.0.as_ref().map_or(0, Vec::len)
    }
}

impl JavaEnv {
    /// A function of the table.
    ///
    /// # Safety
    ///
    /// `F` is the type of the function in that place.
    unsafe fn find_function<F: Copy>(self, place: usize) -> F {
        const { assert!(size_of::<F>() == size_of::<*const c_void>()) };
        // SAFETY: Java's environment begins with the table's address, and the table is longer than any place above.
        unsafe { std::mem::transmute_copy(&*self.0.cast::<*const *const c_void>().read().add(place)) }
    }

    fn read_text(self, array: JavaObject) -> JavaText {
        if array.is_null() {
            return JavaText(None);
        }
        // SAFETY: the types are those of the specification; `array` is a `byte[]`, and the buffer has its length.
        unsafe {
            let length: extern "system" fn(Self, JavaObject) -> i32 = self.find_function(GET_ARRAY_LENGTH);
            let get: extern "system" fn(Self, JavaObject, i32, i32, *mut u8) =
                self.find_function(GET_BYTE_ARRAY_REGION);
            let mut bytes = vec![0; usize::try_from(length(self, array)).unwrap_or(0)];
            get(self, array, 0, bytes.len() as i32, bytes.as_mut_ptr());
            JavaText(Some(bytes))
        }
    }

    /// A new `byte[]`; null if Java has no memory for it, which it throws then.
    fn new_array(self, bytes: &[u8]) -> JavaObject {
        // SAFETY: the types are those of the specification, and the array has the length of `bytes`.
        unsafe {
            let new: extern "system" fn(Self, i32) -> JavaObject = self.find_function(NEW_BYTE_ARRAY);
            let set: extern "system" fn(Self, JavaObject, i32, i32, *const u8) =
                self.find_function(SET_BYTE_ARRAY_REGION);
            let array = new(self, bytes.len() as i32);
            if !array.is_null() {
                set(self, array, 0, bytes.len() as i32, bytes.as_ptr());
            }
            array
        }
    }

    /// A `byte[]` with a text of the C API.
    fn new_text(self, text: *const c_char) -> JavaObject {
        // SAFETY: the C API's texts end with a byte 0 and live until this thread's next call.
        self.new_array(unsafe { CStr::from_ptr(text) }.to_bytes())
    }

    /// Writes the first elements of a `long[]`, unless Java throws already.
    fn write_longs(self, array: JavaObject, values: &[i64]) {
        if !self.is_throwing() {
            // SAFETY: the type is that of the specification; Java throws if the array is too short.
            unsafe {
                let set: extern "system" fn(Self, JavaObject, i32, i32, *const i64) =
                    self.find_function(SET_LONG_ARRAY_REGION);
                set(self, array, 0, values.len() as i32, values.as_ptr());
            }
        }
    }

    fn is_throwing(self) -> bool {
        // SAFETY: the type is that of the specification.
        unsafe {
            let check: extern "system" fn(Self) -> u8 = self.find_function(EXCEPTION_CHECK);
            check(self) != 0
        }
    }
}

/// Java's receiver of pieces, and its method.
struct JavaReceiver {
    env: JavaEnv,
    object: JavaObject,
    method: *mut c_void,
}

impl JavaReceiver {
    /// Finds `int accept(int, byte[])`; without one Java throws.
    fn find_method(env: JavaEnv, object: JavaObject) -> Self {
        // SAFETY: the types are those of the specification, `object` is not null, and both texts end with a byte 0.
        let method = unsafe {
            let class: extern "system" fn(JavaEnv, JavaObject) -> JavaObject =
                env.find_function(GET_OBJECT_CLASS);
            let find: extern "system" fn(JavaEnv, JavaObject, *const c_char, *const c_char) -> *mut c_void =
                env.find_function(GET_METHOD_ID);
            find(env, class(env, object), c"accept".as_ptr(), c"(I[B)I".as_ptr())
        };
        Self { env, object, method }
    }

    /// Gives a piece to Java. Returns true if Java cancels the text, or throws.
    fn accept_piece(&self, kind: i32, text: &[u8]) -> bool {
        let (env, array) = (self.env, self.env.new_array(text));
        if array.is_null() {
            return true;
        }
        // SAFETY: the types are those of the specification; an argument is eight bytes, of which an int uses the first,
        // as targets are little-endian; the method takes these two. `array` is not used again.
        unsafe {
            let call: extern "system" fn(JavaEnv, JavaObject, *mut c_void, *const u64) -> i32 =
                env.find_function(CALL_INT_METHOD_A);
            let delete: extern "system" fn(JavaEnv, JavaObject) = env.find_function(DELETE_LOCAL_REF);
            let answer =
                call(env, self.object, self.method, [u64::from(kind as u32), array.addr() as u64].as_ptr());
            let cancels = env.is_throwing() || answer != 0;
            delete(env, array);
            cancels
        }
    }
}

/// Callback of the C API that gives a piece to the [`JavaReceiver`] in `user_data`.
unsafe extern "C" fn pass_piece(
    kind: i32,
    piece: *const c_char,
    length: usize,
    user_data: *mut c_void,
) -> i32 {
    // SAFETY: `generate_text` passes a receiver that lives as long as the call, and the C API a piece of that length.
    unsafe {
        let receiver = &*user_data.cast::<JavaReceiver>();
        receiver.accept_piece(kind, std::slice::from_raw_parts(piece.cast(), length)).into()
    }
}

/// `antigravity_generate` or `antigravity_chat`.
type TextFunction = unsafe extern "C" fn(
    *mut SessionHandle,
    *const c_char,
    usize,
    *const c_char,
    usize,
    PieceCallback,
    *mut c_void,
    *mut TextResult,
) -> i32;

/// Generates a text and writes its end to `out`.
fn generate_text(
    function: TextFunction,
    env: JavaEnv,
    session: i64,
    [text, options, receiver, out]: [JavaObject; 4],
) -> i32 {
    let (text, options) = (env.read_text(text), env.read_text(options));
    let mut receiver = JavaReceiver::find_method(env, receiver);
    if receiver.method.is_null() {
        return 0;
    }
    let mut result = TextResult::default();
    // SAFETY: the texts have their lengths, receiver and result live during the call, and nothing else uses them.
    let status = unsafe {
        let (callback, user_data): (PieceCallback, _) = (Some(pass_piece), (&raw mut receiver).cast());
        let [text, options] = [&text, &options].map(|text| (text.as_ptr(), text.len()));
        function(
            to_handle(session),
            text.0,
            text.1,
            options.0,
            options.1,
            callback,
            user_data,
            &raw mut result,
        )
    };
    let TextResult { stop_reason, prompt_tokens, tokens, first_token_us, decoding_us, seed, .. } = result;
    let numbers = [stop_reason.into(), prompt_tokens, tokens, first_token_us, decoding_us, seed];
    env.write_longs(out, &numbers.map(|number| number as i64));
    status
}

/// `antigravity_session_save` or `antigravity_session_load`.
type PathFunction = unsafe extern "C" fn(*mut SessionHandle, *const c_char, usize) -> i32;

/// Saves or loads a session.
fn call_with_path(function: PathFunction, env: JavaEnv, session: i64, path: JavaObject) -> i32 {
    let path = env.read_text(path);
    // SAFETY: the text has its length.
    unsafe { function(to_handle(session), path.as_ptr(), path.len()) }
}

/// A handle as the C API has it.
fn to_handle<T>(handle: i64) -> *mut T {
    without_provenance_mut(handle as usize)
}

#[unsafe(no_mangle)]
pub extern "system" fn Java_org_antigravity_Model_lastError(env: JavaEnv, _: JavaObject) -> JavaObject {
    env.new_text(antigravity_last_error())
}

#[unsafe(no_mangle)]
pub extern "system" fn Java_org_antigravity_Model_modelInfo(env: JavaEnv, _: JavaObject) -> JavaObject {
    env.new_text(antigravity_model_info())
}

#[unsafe(no_mangle)]
pub extern "system" fn Java_org_antigravity_Model_loadPath(
    env: JavaEnv,
    _: JavaObject,
    path: JavaObject,
    options: JavaObject,
    out: JavaObject,
) -> i32 {
    let (path, options) = (env.read_text(path), env.read_text(options));
    let mut engine: *mut EngineHandle = null_mut();
    // SAFETY: the texts have their lengths, and `engine` is a place for the result.
    let status = unsafe {
        antigravity_load(path.as_ptr(), path.len(), options.as_ptr(), options.len(), &raw mut engine)
    };
    env.write_longs(out, &[engine.addr() as i64]);
    status
}

#[unsafe(no_mangle)]
pub extern "system" fn Java_org_antigravity_Model_loadDescriptor(
    env: JavaEnv,
    _: JavaObject,
    fd: i32,
    offset: i64,
    length: i64,
    options: JavaObject,
    out: JavaObject,
) -> i32 {
    let options = env.read_text(options);
    let mut engine: *mut EngineHandle = null_mut();
    let (offset, length) = (offset as u64, length as u64);
    // SAFETY: the text has its length, and `engine` is a place for the result.
    let status =
        unsafe { antigravity_load_fd(fd, offset, length, options.as_ptr(), options.len(), &raw mut engine) };
    env.write_longs(out, &[engine.addr() as i64]);
    status
}

#[unsafe(no_mangle)]
pub extern "system" fn Java_org_antigravity_Model_freeModel(_: JavaEnv, _: JavaObject, model: i64) -> i32 {
    antigravity_free(to_handle(model))
}

#[unsafe(no_mangle)]
pub extern "system" fn Java_org_antigravity_Model_newSession(
    env: JavaEnv,
    _: JavaObject,
    model: i64,
    out: JavaObject,
) -> i32 {
    let mut session: *mut SessionHandle = null_mut();
    // SAFETY: `session` is a place for the result.
    let status = unsafe { antigravity_session_new(to_handle(model), &raw mut session) };
    env.write_longs(out, &[session.addr() as i64]);
    status
}

#[unsafe(no_mangle)]
pub extern "system" fn Java_org_antigravity_Model_freeSession(
    _: JavaEnv,
    _: JavaObject,
    session: i64,
) -> i32 {
    antigravity_session_free(to_handle(session))
}

#[unsafe(no_mangle)]
pub extern "system" fn Java_org_antigravity_Model_cancelSession(
    _: JavaEnv,
    _: JavaObject,
    session: i64,
) -> i32 {
    antigravity_cancel(to_handle(session))
}

#[unsafe(no_mangle)]
pub extern "system" fn Java_org_antigravity_Model_saveSession(
    env: JavaEnv,
    _: JavaObject,
    session: i64,
    path: JavaObject,
) -> i32 {
    call_with_path(antigravity_session_save, env, session, path)
}

#[unsafe(no_mangle)]
pub extern "system" fn Java_org_antigravity_Model_loadSession(
    env: JavaEnv,
    _: JavaObject,
    session: i64,
    path: JavaObject,
) -> i32 {
    call_with_path(antigravity_session_load, env, session, path)
}

#[unsafe(no_mangle)]
pub extern "system" fn Java_org_antigravity_Model_generate(
    env: JavaEnv,
    _: JavaObject,
    session: i64,
    prompt: JavaObject,
    options: JavaObject,
    receiver: JavaObject,
    out: JavaObject,
) -> i32 {
    generate_text(antigravity_generate, env, session, [prompt, options, receiver, out])
}

#[unsafe(no_mangle)]
pub extern "system" fn Java_org_antigravity_Model_chat(
    env: JavaEnv,
    _: JavaObject,
    session: i64,
    messages: JavaObject,
    options: JavaObject,
    receiver: JavaObject,
    out: JavaObject,
) -> i32 {
    generate_text(antigravity_chat, env, session, [messages, options, receiver, out])
}
