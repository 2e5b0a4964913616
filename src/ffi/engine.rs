//! Functions about the library, a model and its tokens.

use super::border::{check_out, last_error, read_array, read_text, run_guarded, write_array, write_out};
use super::handles::HandleTable;
use super::options::{LoadFlags, parse_embed_options};
use super::status::ANTIGRAVITY_ABI_VERSION;
use crate::cli;
use crate::dims;
use crate::run::engine::{Engine, template_source};
use crate::run::options::{EngineOptions, GenerateOptions};
use crate::run::plan::OpenedModel;
use files::file_range::FileRange;
use files::{Error, Result};
use serde_json::json;
use std::ffi::{CStr, CString, OsStr, c_char, c_void};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::OnceLock;
use text::chat::TemplateKwargs;
use text::sampler::sum_logprobs;
use text::tokenizer::{AddSpecial, SpecialText};

/// A loaded model.
#[repr(C)]
pub struct EngineHandle {
    _opaque: [u8; 0],
}

/// Memory in bytes that a model needs, and that the system has for it.
#[repr(C)]
pub struct MemoryNeed {
    /// Memory that must be available, or loading fails.
    pub needed: u64,
    /// Upper bound of the process's resident memory.
    pub peak: u64,
    /// Memory that is available; UINT64_MAX if the system does not tell.
    pub available: u64,
}

/// An engine, with what it needs as long as it lives.
pub struct LoadedModel {
    pub engine: Engine,
    /// Variables for the chat template, which those of a conversation replace.
    pub template_kwargs: TemplateKwargs,
    /// The file that the engine reads, if it was given as a descriptor.
    _file: Option<OwnedFd>,
}

pub static ENGINES: HandleTable<LoadedModel> = HandleTable::new("engine");

/// The ABI version of the library: compare it with ANTIGRAVITY_ABI_VERSION.
#[unsafe(no_mangle)]
pub extern "C" fn antigravity_abi_version() -> u32 {
    ANTIGRAVITY_ABI_VERSION
}

/// The version of the library, as `antigravity --version` prints it.
#[unsafe(no_mangle)]
pub extern "C" fn antigravity_version() -> *const c_char {
    static TEXT: OnceLock<CString> = OnceLock::new();
    TEXT.get_or_init(|| CString::new(cli::version_text()).unwrap_or_default()).as_ptr()
}

/// Facts about the model that the library is built for, as a JSON object.
#[unsafe(no_mangle)]
pub extern "C" fn antigravity_model_info() -> *const c_char {
    static TEXT: OnceLock<CString> = OnceLock::new();
    let facts = || {
        json!({
            "model": dims::MODEL,
            "architecture": dims::ARCH.name(),
            "vocab_size": dims::VOCAB,
            "hidden_size": dims::DIM,
            "layers": dims::LAYERS,
            "max_positions": dims::MAX_POSITION,
        })
    };
    TEXT.get_or_init(|| CString::new(facts().to_string()).unwrap_or_default()).as_ptr()
}

/// The message of the last call of this thread that failed: one line, valid until the thread's next call. It names the
/// argument, the file or the option, and the remedy.
#[unsafe(no_mangle)]
pub extern "C" fn antigravity_last_error() -> *const c_char {
    last_error()
}

/// Tells how much memory a model will need, without loading it. Arguments as of antigravity_load.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn antigravity_plan(
    model: *const c_char,
    model_length: usize,
    options: *const c_char,
    options_length: usize,
    memory: *mut MemoryNeed,
) -> i32 {
    run_guarded(|| {
        check_out("memory", memory)?;
        // SAFETY: the rule of pointers, which the header tells callers.
        let (model, options) = unsafe {
            (read_text("model", model, model_length)?, read_text("options", options, options_length)?)
        };
        let (_, engine_options) = resolve_options(model, options.unwrap_or_default())?;
        let plan = OpenedModel::new(&engine_options)?.plan;
        let available = plan.memory.usable_bytes().unwrap_or(u64::MAX);
        let need = MemoryNeed { needed: plan.needed_bytes(), peak: plan.peak_bytes(), available };
        // SAFETY: as above.
        unsafe { write_out("memory", memory, need) }
    })
}

/// Loads a model: a directory, a .gguf file, a packed file or a bundle. NULL is the model inside the file of this
/// library, or of the program it is linked into, where `antigravity bundle --program` put it. The options are a JSON
/// object with the flags of `antigravity generate` about model, device and cache, such as {"max_seq_len": 4096,
/// "backend": "auto"}, and `chat_template`; NULL takes the defaults.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn antigravity_load(
    model: *const c_char,
    model_length: usize,
    options: *const c_char,
    options_length: usize,
    engine: *mut *mut EngineHandle,
) -> i32 {
    run_guarded(|| {
        check_out("engine", engine)?;
        // SAFETY: the rule of pointers, which the header tells callers.
        let (model, options) = unsafe {
            (read_text("model", model, model_length)?, read_text("options", options, options_length)?)
        };
        let (flags, options) = resolve_options(model, options.unwrap_or_default())?;
        // SAFETY: as above.
        unsafe { write_out("engine", engine, load_engine(&flags, &options, None)?) }
    })
}

/// Loads a model from a part of an open file, such as an asset that is stored uncompressed in an Android package: a
/// GGUF file, or a file that `antigravity bundle --no-program` wrote. A length of 0 means to the end of the file. The
/// descriptor may be closed afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn antigravity_load_fd(
    fd: i32,
    offset: u64,
    length: u64,
    options: *const c_char,
    options_length: usize,
    engine: *mut *mut EngineHandle,
) -> i32 {
    run_guarded(|| {
        check_out("engine", engine)?;
        // SAFETY: the rule of pointers, which the header tells callers.
        let options = unsafe { read_text("options", options, options_length) }?.unwrap_or_default();
        // SAFETY: `fcntl` accepts any number.
        if unsafe { libc::fcntl(fd, libc::F_GETFD) } == -1 {
            return Err(Error::Usage(format!("`fd` {fd} is not an open file descriptor")));
        }
        // SAFETY: open, checked above; the caller keeps it open during the call.
        let own = unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned();
        let own = own.map_err(|e| Error::Usage(format!("`fd` {fd}: {e}")))?;
        let path = FileRange::path_of(std::os::fd::AsFd::as_fd(&own), offset, length)?;
        // The program's flags know whole files only.
        let (flags, options) = resolve_options(Some("/proc/self/fd"), options)?;
        let options = EngineOptions { model: path, ..options };
        // SAFETY: as above.
        unsafe { write_out("engine", engine, load_engine(&flags, &options, Some(own))?) }
    })
}

/// Frees a model. Its sessions stay usable, and keep its memory until they are freed. NULL is fine.
#[unsafe(no_mangle)]
pub extern "C" fn antigravity_free(engine: *mut EngineHandle) -> i32 {
    run_guarded(|| if engine.is_null() { Ok(()) } else { ENGINES.remove(engine.addr()).map(drop) })
}

/// Turns a text into token ids. If `add_special` is not 0, they begin with the tokens that the model wants before a
/// prompt. `count` receives their number, even if `buffer` is too small, which is an error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn antigravity_tokenize(
    engine: *mut EngineHandle,
    text: *const c_char,
    text_length: usize,
    add_special: i32,
    buffer: *mut u32,
    capacity: usize,
    count: *mut usize,
) -> i32 {
    run_guarded(|| {
        let model = ENGINES.find_entry(engine.addr())?;
        // SAFETY: the rule of pointers, which the header tells callers.
        let text = unsafe { read_text("text", text, text_length) }?.unwrap_or_default();
        let special = if add_special == 0 { AddSpecial::No } else { AddSpecial::Yes };
        let ids = model.engine.tokenizer().encode_until(text, SpecialText::AsTokens, special, &|| false)?;
        // SAFETY: as above.
        unsafe { write_array(&ids, (buffer, capacity), count) }
    })
}

/// Turns token ids into text, special tokens included. `count` receives its number of bytes, even if `buffer` is too
/// small, which is an error. No byte 0 is added.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn antigravity_detokenize(
    engine: *mut EngineHandle,
    ids: *const u32,
    ids_length: usize,
    buffer: *mut c_char,
    capacity: usize,
    count: *mut usize,
) -> i32 {
    run_guarded(|| {
        let model = ENGINES.find_entry(engine.addr())?;
        // SAFETY: the rule of pointers, which the header tells callers.
        let ids = unsafe { read_array("ids", ids, ids_length) }?.unwrap_or_default();
        let (tokenizer, size) = (model.engine.tokenizer(), model.engine.tokenizer().vocab_size());
        if let Some(id) = ids.iter().find(|&&id| id as usize >= size) {
            return Err(Error::Usage(format!("`ids`: {id} is not a token; the model has {size}")));
        }
        let text = tokenizer.decode_with_special(ids);
        // SAFETY: as above.
        unsafe { write_array(text.as_bytes(), (buffer.cast::<u8>(), capacity), count) }
    })
}

/// Computes one vector of length 1 for each text of a JSON array of strings. The options are a JSON object with
/// `pooling` (mean, cls or last; the default is what the model's files say) and `dimensions`; NULL takes the defaults.
/// `buffer` receives the vectors one after another: give it room for `hidden_size` values a text. `count` receives the
/// number of values.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn antigravity_embed(
    engine: *mut EngineHandle,
    texts: *const c_char,
    texts_length: usize,
    options: *const c_char,
    options_length: usize,
    buffer: *mut f32,
    capacity: usize,
    count: *mut usize,
) -> i32 {
    run_guarded(|| {
        check_out("count", count)?;
        let model = ENGINES.find_entry(engine.addr())?;
        // SAFETY: the rule of pointers, which the header tells callers.
        let (texts, options) = unsafe {
            (read_text("texts", texts, texts_length)?, read_text("options", options, options_length)?)
        };
        let texts = parse_texts(texts)?;
        let options = parse_embed_options(options.unwrap_or_default())?;
        let ids = texts.iter().map(|text| model.engine.encode(text)).collect::<Result<Vec<_>>>()?;
        let vectors = model.engine.embed(&ids, &options, None)?.concat();
        // SAFETY: as above.
        unsafe { write_array(&vectors, (buffer, capacity), count) }
    })
}

/// Computes how probable each text of a JSON array of strings is behind a prompt: the sum of the natural logarithms of
/// its tokens' probabilities, without the prompt's. The first token of all has none. The prompt may be NULL. `buffer`
/// receives a number for each text, and `count` how many.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn antigravity_score(
    engine: *mut EngineHandle,
    prompt: *const c_char,
    prompt_length: usize,
    texts: *const c_char,
    texts_length: usize,
    buffer: *mut f64,
    capacity: usize,
    count: *mut usize,
) -> i32 {
    run_guarded(|| {
        check_out("count", count)?;
        let model = ENGINES.find_entry(engine.addr())?;
        // SAFETY: the rule of pointers, which the header tells callers.
        let (prompt, texts) = unsafe {
            (read_text("prompt", prompt, prompt_length)?, read_text("texts", texts, texts_length)?)
        };
        let (prompt, texts) = (prompt.unwrap_or_default(), parse_texts(texts)?);
        let scores = model.engine.score(prompt, &texts, &GenerateOptions::default())?;
        let sums: Vec<f64> = scores.iter().map(|tokens| sum_logprobs(tokens)).collect();
        // SAFETY: as above.
        unsafe { write_array(&sums, (buffer, capacity), count) }
    })
}

/// Parses the texts of a call.
fn parse_texts(texts: Option<&str>) -> Result<Vec<String>> {
    serde_json::from_str(texts.unwrap_or_default())
        .map_err(|e| Error::Usage(format!("`texts` is not a JSON array of strings: {e}")))
}

/// Parses the options for a model.
fn resolve_options(model: Option<&str>, options: &str) -> Result<(LoadFlags, EngineOptions)> {
    let own;
    let model = match model {
        Some(path) => path,
        None => {
            own = library_path()?;
            own.to_str().ok_or_else(|| Error::model(&own, "is not UTF-8; move the library"))?
        }
    };
    let flags = LoadFlags::parse_options(options, model)?;
    let options = flags.model.resolve_for_one_text()?;
    Ok((flags, options))
}

/// The file of this library, which must be a bundle.
fn library_path() -> Result<PathBuf> {
    let mut info = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    };
    let address: *const c_void = (antigravity_abi_version as extern "C" fn() -> u32 as *const ()).cast();
    // SAFETY: `info` is a place for the result; any address may be asked for.
    if unsafe { libc::dladdr(address, &mut info) } == 0 || info.dli_fname.is_null() {
        return Err(Error::Usage("`model` is NULL, but the library's file is unknown; give a path".into()));
    }
    // SAFETY: `dladdr` succeeded, so this is the name of a loaded library, which stays loaded.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    let path = PathBuf::from(OsStr::from_bytes(name.to_bytes()));
    if files::bundle::find_mark(&path).is_none() {
        let remedy = "give its path as `model`, or write it into the library by antigravity bundle --program";
        return Err(Error::model(&path, format!("has no model inside; {remedy}")));
    }
    Ok(path)
}

/// Loads a model and returns its handle.
fn load_engine(
    flags: &LoadFlags,
    options: &EngineOptions,
    file: Option<OwnedFd>,
) -> Result<*mut EngineHandle> {
    let opened = OpenedModel::new(options)?;
    opened.plan.check()?;
    let given =
        flags.template.is_given().then(|| flags.template.load_template(&template_source(&opened.model)));
    let (template, template_kwargs) = (given.transpose()?, flags.template.parse_variables()?);
    let engine = Engine::load_opened(opened, &|_, _| {})?;
    let engine = match template {
        Some(template) => engine.with_template(template)?,
        None => engine,
    };
    let handle = ENGINES.insert(LoadedModel { engine, template_kwargs, _file: file });
    Ok(std::ptr::without_provenance_mut(handle))
}
