//! The library's front door: load a model, generate text.

mod sessions;

use crate::dims::{HAS_EXPERTS, VOCAB};
use crate::model::cpu::CpuDevice;
use crate::model::weights::{Assistant, Importance, LoadOptions, OpenModel, Weights};
use crate::opencl;
use crate::run::calibration;
use crate::run::draft_model::assistant::AssistantDrafter;
use crate::run::draft_model::mtp::MtpDrafter;
use crate::run::draft_model::{DraftModel, DraftSettings};
use crate::run::embed::{EmbedderSlot, Pooling};
use crate::run::eviction::Policy;
use crate::run::kept_experts::ExpertKeeper;
use crate::run::options::{BackendKind, EngineOptions, long_prompt_error};
use crate::run::placement::{self, DeviceFactory, Devices, KernelCompiler, StageModel};
use crate::run::plan::{OpenedModel, Plan};
use crate::run::session::CancelToken;
use files::source::gguf::Gguf;
use files::{Error, Result};
use numeric::simd::Isa;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use text::chat::{Message, PromptEnding, RenderContext, Template, TemplateKwargs, TemplateSource, UtcTime};
#[cfg(feature = "chat")]
use text::sampler::SamplerOptions;
use text::tokenizer::{AddSpecial, SpecialText, Tokenizer};

use sessions::{upload_stages, upload_weights};

/// A loaded model. Sequences that it made stay usable after it is dropped.
///
/// ```
/// use antigravity::{Engine, EngineOptions, GenerateOptions};
///
/// let engine = Engine::load(EngineOptions::new(antigravity::dims::MODEL_DIR))?;
/// let mut options = GenerateOptions { max_tokens: Some(8), ..Default::default() };
/// options.sampler.temperature = 0.0;
///
/// let text = engine.generate("Once upon a time", &options)?;
/// assert!(!text.is_empty());
///
/// // Streaming the same text, piece by piece.
/// let mut session = engine.session()?;
/// let prompt = engine.encode("Once upon a time")?;
/// let mut streamed = String::new();
/// for piece in engine.stream(&mut session, &prompt, &options)? {
///     streamed += &piece?;
/// }
/// assert_eq!(streamed, text);
/// # Ok::<(), antigravity::Error>(())
/// ```
pub struct Engine {
    options: EngineOptions,
    factory: DeviceFactory,
    tokenizer: Tokenizer,
    template_source: TemplateSource,
    /// Sampling options that the model recommends for conversations.
    #[cfg(feature = "chat")]
    recommended_sampling: Result<SamplerOptions>,
    /// The chat template, loaded on first use.
    template: OnceLock<Result<Template>>,
    /// The model on an OpenCL device, if one runs it.
    device: Option<Arc<opencl::Model>>,
    /// The stages of a split; empty without one. The first OpenCL device of them is `device`.
    stages: Vec<StageModel>,
    /// Devices in use; chosen at load, or at the first sequence if that may begin on the CPU.
    devices: OnceLock<Devices>,
    /// Compiles kernels while the CPU computes, if there is memory for the caches of both.
    compiler: Option<Arc<KernelCompiler>>,
    /// The draft program, if there is one.
    draft: Option<DraftModel>,
    /// The model's assistant, if it drafts.
    assistant: Option<AssistantDrafter>,
    /// The model's own block that drafts, if it has one; made when drafts are first asked for.
    mtp: OnceLock<Option<MtpDrafter>>,
    /// Pooling of embeddings that the model's files name.
    pooling: Result<Option<Pooling>>,
    pub(super) embedder: EmbedderSlot,
    /// Counts the uses of experts; `None` if the model has none.
    experts: Option<ExpertKeeper>,
}

impl Engine {
    /// Loads weights and tokenizer, silently.
    pub fn load(options: EngineOptions) -> Result<Self> {
        Self::load_opened(OpenedModel::new(&options)?, &|_, _| {})
    }

    /// Loads weights and tokenizer of an opened model. `progress` gets the number of tensors done and of all tensors.
    pub fn load_opened(opened: OpenedModel, progress: &(dyn Fn(usize, usize) + Sync)) -> Result<Self> {
        let OpenedModel { plan, model, tokenizer, .. } = opened;
        plan.check()?;
        let whole_on_cpu = plan.check_fallback();
        let options = plan.options;
        let isa = match options.isa {
            Some(isa) => isa,
            None => Isa::detect()?,
        };
        let assistant = load_assistant(&options)?;
        let drafted = options.draft > 0 && options.draft_model.is_some() && assistant.is_none();
        // The draft program loads its model while this one is loaded.
        let early = if drafted && tokenizer.is_none() { Some(tokenizer_of(&model)?) } else { tokenizer };
        let draft =
            early.as_ref().filter(|_| drafted).map(|t| draft_model(&options, t)).transpose()?.flatten();
        let mut weights = load_weights(&model, &options, progress)?;
        let tokenizer = early.map_or_else(|| tokenizer_of(&model), Ok)?;
        let template_source = template_source(&model);
        #[cfg(feature = "chat")]
        let recommended_sampling = recommended_sampling(&model);
        let pooling = Pooling::of_model(&model);
        let both_fit = can_compile_meanwhile(&model, &options);
        // Unmaps the files whose tensors were converted.
        drop(model);
        let device = upload_weights(&options, &mut weights)?;
        let weights = Arc::new(weights);
        let stages = upload_stages(&options, &weights)?;
        let whole = device
            .map(|(device, matrices)| Arc::new(opencl::Model::new(device, Arc::clone(&weights), matrices)));
        let device = whole.or_else(|| stages.iter().find_map(|(_, model)| model.clone()));
        let assistant = assistant.map(|a| AssistantDrafter::new(&weights, a, isa, &options)).transpose()?;
        let (template, devices, factory) =
            (OnceLock::new(), OnceLock::new(), DeviceFactory { weights, isa, whole_on_cpu });
        let compiler =
            device.as_ref().filter(|_| both_fit).map(|model| KernelCompiler::new(model.device().clone()));
        let mut engine = Self {
            options,
            factory,
            tokenizer,
            template_source,
            #[cfg(feature = "chat")]
            recommended_sampling,
            template,
            device,
            stages,
            devices,
            compiler,
            draft,
            assistant,
            mtp: OnceLock::new(),
            pooling,
            embedder: EmbedderSlot::default(),
            experts: None,
        };
        engine.ensure_calibration(&engine.options)?;
        let auto = engine.options.backend == BackendKind::Auto;
        if !(auto && engine.begins_early()) {
            engine.choose_devices()?;
        }
        engine.experts = HAS_EXPERTS.then(|| ExpertKeeper::new(&engine.factory.weights, &engine.options));
        Ok(engine)
    }

    /// Makes sure that there is a calibration, if a cache with these options needs it.
    fn ensure_calibration(&self, o: &EngineOptions) -> Result<()> {
        let weights = &self.factory.weights;
        if o.kv_types.k.is_rotated() && weights.calibration().is_none() {
            weights.set_calibration(calibration::load_or_compute(weights, &self.tokenizer, &self.options)?);
        }
        Ok(())
    }

    /// Refuses a prompt that is too long for the context before the weights are loaded, which takes longer. Loads the
    /// tokenizer only if the prompt has more bytes than the context has tokens.
    ///
    /// # Errors
    ///
    /// `Usage` if it is too long, and errors of the tokenizer.
    pub fn check_prompt(opened: &mut OpenedModel, text: &str, specials: SpecialText) -> Result<()> {
        let o = &opened.plan.options;
        let have = o.max_seq_len;
        if text.len() <= have || o.eviction.policy != Policy::None {
            return Ok(());
        }
        let tokenizer = opened.tokenizer.insert(tokenizer_of(&opened.model)?);
        let least = tokenizer.min_tokens(text);
        if least > have {
            return Err(long_prompt_error(&format!("at least {least}"), have));
        }
        match tokenizer.encode_until(text, specials, AddSpecial::Yes, &|| false)?.len() {
            need if need > have => Err(long_prompt_error(&need.to_string(), have)),
            _ => Ok(()),
        }
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Sampling options that the model recommends for conversations.
    ///
    /// # Errors
    ///
    /// `Model` for a recommended value that cannot be used.
    #[cfg(feature = "chat")]
    pub fn recommended_sampling(&self) -> Result<SamplerOptions> {
        self.recommended_sampling.clone()
    }

    /// The weights.
    pub fn weights(&self) -> &Arc<Weights> {
        &self.factory.weights
    }

    /// Counts the uses of experts; `None` if the model has none.
    pub fn expert_keeper(&self) -> Option<&ExpertKeeper> {
        self.experts.as_ref()
    }

    /// From now on, does not save how often experts are used.
    pub fn discard_expert_counts(&mut self) {
        self.experts.iter_mut().for_each(ExpertKeeper::discard_counts);
    }

    /// The CPU's instruction set.
    pub(crate) fn isa(&self) -> Isa {
        self.factory.isa
    }

    /// Pooling of embeddings that the model's files name; `None` if they name none.
    ///
    /// # Errors
    ///
    /// `Model` for one that this program does not have.
    pub fn model_pooling(&self) -> Result<Option<Pooling>> {
        self.pooling.clone()
    }

    /// A CPU device of its own for these options.
    pub(super) fn cpu_device(&self, o: &EngineOptions) -> Result<CpuDevice> {
        self.factory.cpu_device(o)
    }

    /// The options in force, defaults resolved.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// The OpenCL device that runs the model.
    pub fn device(&self) -> Option<&opencl::Device> {
        self.device.as_ref().map(|model| model.device())
    }

    /// The draft program, if [`EngineOptions::draft_model`] names one.
    pub fn draft_model(&self) -> Option<&DraftModel> {
        self.draft.as_ref()
    }

    /// Encodes a prompt, with the special tokens that the model's tokenizer adds.
    ///
    /// # Errors
    ///
    /// `Usage` for a text that is obviously too long for the context, without encoding it.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_cancellable(text, SpecialText::AsTokens, &CancelToken::default())
    }

    /// [`Engine::encode`] with a choice of how control tokens in the text are treated. Encoding megabytes takes seconds
    /// and can be cancelled.
    ///
    /// # Errors
    ///
    /// `Interrupted`, and errors of [`Engine::encode`].
    pub fn encode_cancellable(
        &self,
        text: &str,
        specials: SpecialText,
        cancel: &CancelToken,
    ) -> Result<Vec<u32>> {
        let (least, have) = (self.tokenizer.min_tokens(text), self.options.max_seq_len);
        if least > have && self.options.eviction.policy == Policy::None {
            return Err(long_prompt_error(&format!("at least {least}"), have));
        }
        self.tokenizer.encode_until(text, specials, AddSpecial::Yes, &|| cancel.is_cancelled())
    }

    /// Number of tokens of a text, without added special tokens.
    ///
    /// ```
    /// # use antigravity::{Engine, EngineOptions};
    /// # let engine = Engine::load(EngineOptions::new(antigravity::dims::MODEL_DIR))?;
    /// let prompt = "Once upon a time";
    /// assert!((1..=prompt.len()).contains(&engine.count_tokens(prompt)?));
    /// assert_eq!(engine.count_tokens("")?, 0);
    /// # Ok::<(), antigravity::Error>(())
    /// ```
    pub fn count_tokens(&self, text: &str) -> Result<usize> {
        Ok(self.tokenizer.encode(text, AddSpecial::No)?.len())
    }

    /// The chat template: the model's own, or one that fits its control tokens.
    ///
    /// # Errors
    ///
    /// `Model` for a template that cannot be used.
    pub fn template(&self) -> Result<&Template> {
        let load = || self.template_source.load_template()?.for_tokenizer(&self.tokenizer);
        self.template.get_or_init(load).as_ref().map_err(Error::clone)
    }

    /// Replaces the model's chat template.
    ///
    /// # Errors
    ///
    /// `Model` for one that cannot be used with this tokenizer.
    pub fn with_template(mut self, template: Template) -> Result<Self> {
        self.template = OnceLock::from(Ok(template.for_tokenizer(&self.tokenizer)?));
        Ok(self)
    }

    /// Formats a conversation as the prompt for its next answer: see [`Template::format_prompt`]. Answers end with
    /// [`Template::stop_tokens`]. For untrusted messages use [`Engine::encode_chat`]: in one formatted text, control
    /// tokens spelled in a message become control tokens.
    ///
    /// ```
    /// use antigravity::chat::{Message, Role};
    /// use antigravity::{Engine, EngineOptions, GenerateOptions};
    ///
    /// let engine = Engine::load(EngineOptions::new(antigravity::dims::MODEL_DIR))?;
    /// let prompt = engine.format_prompt(&[Message::new(Role::User, "Tell me of a dog.")])?;
    /// assert!(prompt.contains("Tell me of a dog."));
    ///
    /// let stop_tokens = engine.template()?.stop_tokens(engine.tokenizer());
    /// let options = GenerateOptions { max_tokens: Some(4), stop_tokens, ..Default::default() };
    /// let answer = engine.generate(&prompt, &options)?;
    /// # assert!(!answer.contains("Tell me of a dog."));
    /// # Ok::<(), antigravity::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Errors of [`Engine::template`] and [`Template::render_messages`].
    pub fn format_prompt(&self, messages: &[Message]) -> Result<String> {
        self.template()?.format_prompt(messages)
    }

    /// Encodes a conversation as the prompt for its next answer, for [`Engine::stream`]. Control tokens spelled in
    /// messages stay text.
    ///
    /// # Errors
    ///
    /// Errors of [`Engine::template`] and [`Template::encode_messages`].
    pub fn encode_chat(&self, messages: &[Message]) -> Result<Vec<u32>> {
        self.encode_chat_with(messages, &TemplateKwargs::default())
    }

    /// [`Engine::encode_chat`] with tools and other variables for the template.
    /// [`OutputFormat::for_template`](text::chat::OutputFormat::for_template) and
    /// [`OutputParser`](text::chat::OutputParser) read the answer: thoughts, text and calls.
    ///
    /// ```
    /// use antigravity::chat::{AnswerPart, Message, OutputFormat, OutputParser, Role, TemplateKwargs};
    /// use antigravity::{Engine, EngineOptions, GenerateOptions};
    ///
    /// let engine = Engine::load(EngineOptions::new(antigravity::dims::MODEL_DIR))?;
    /// let mut variables = TemplateKwargs::default();
    /// variables.set_variable("enable_thinking", "false").unwrap();
    /// let prompt = engine.encode_chat_with(&[Message::new(Role::User, "Hi")], &variables)?;
    ///
    /// let form = OutputFormat::for_template(engine.template()?, engine.tokenizer()).without_tools();
    /// let shown_tokens = form.marker_token_ids(engine.tokenizer());
    /// let options = GenerateOptions { max_tokens: Some(4), shown_tokens, ..Default::default() };
    /// let mut reader = OutputParser::new(form, &engine.tokenizer().decode_with_special(&prompt));
    /// let mut parts = Vec::new();
    /// for piece in engine.stream(&mut engine.session()?, &prompt, &options)? {
    ///     parts.extend(reader.push(&piece?));
    /// }
    /// parts.extend(reader.finish());
    /// assert!(parts.iter().all(|part| matches!(part, AnswerPart::Text(_))), "a story teller has no thoughts");
    /// # Ok::<(), antigravity::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Errors of [`Engine::encode_chat`].
    pub fn encode_chat_with(&self, messages: &[Message], variables: &TemplateKwargs) -> Result<Vec<u32>> {
        let (bos, now) = (self.tokenizer.bos_token(), UtcTime::now());
        let context = RenderContext { bos, now, ending: PromptEnding::Prompt, variables: Some(variables) };
        self.template()?.encode_with_context(&self.tokenizer, messages, &context)
    }
}

/// True if there is enough memory to compile a device's kernels while the CPU computes.
fn can_compile_meanwhile(model: &OpenModel, o: &EngineOptions) -> bool {
    match o.backend {
        BackendKind::OpenCl if o.split.is_some() => false,
        BackendKind::OpenCl => fits_in_memory(model, o, BackendKind::Hybrid),
        // With shared memory, the CPU computes in the device's cache.
        BackendKind::Hybrid => !o.zero_copy,
        BackendKind::Auto => {
            !o.zero_copy && fits_in_memory(model, &placement::options_with_measuring(o), BackendKind::Hybrid)
        }
        BackendKind::Cpu => false,
    }
}

/// True if there is enough memory for an opened model with these options on another backend.
fn fits_in_memory(model: &OpenModel, o: &EngineOptions, backend: BackendKind) -> bool {
    let plan = Plan::for_model(model, &EngineOptions { backend, ..o.clone() });
    plan.is_ok_and(|plan| plan.check().is_ok())
}

/// Starts the draft program, if there is one.
fn draft_model(o: &EngineOptions, tokenizer: &Tokenizer) -> Result<Option<DraftModel>> {
    let Some(program) = &o.draft_model else { return Ok(None) };
    let setting = DraftSettings { slots: o.max_seq_len, sequences: o.sequence_count(), threads: o.threads };
    let notice = o.notice.clone();
    let say = move |line: &str| notice.warn(line);
    DraftModel::start(program, o.draft_when, tokenizer.pieces().compute_checksum(), setting, say).map(Some)
}

/// Loads the model's assistant, if one drafts.
fn load_assistant(o: &EngineOptions) -> Result<Option<Assistant>> {
    o.assistant_folder().map(|folder| Assistant::load(&folder)).transpose()
}

/// Loads the weights, and says what a quantised checkpoint loses.
fn load_weights(
    model: &OpenModel,
    o: &EngineOptions,
    progress: &(dyn Fn(usize, usize) + Sync),
) -> Result<Weights> {
    if let Some(losses) = model.checkpoint.describe_losses(o.weight_type) {
        o.notice.warn(&losses);
    }
    let text = quantising_text(model, o)?;
    let importance = Importance::Text(&text);
    Weights::load(model, &LoadOptions { importance, progress, ..LoadOptions::new(o.weight_type, o.threads) })
}

/// The text by which a checkpoint is quantised while it is loaded, if it is.
fn quantising_text(model: &OpenModel, o: &EngineOptions) -> Result<Vec<u32>> {
    if !o.weight_type.is_calibrated() || model.checkpoint.packed().is_some() {
        return Ok(Vec::new());
    }
    calibration::encode_weighing_text(&tokenizer_of(model)?, None)
}

/// The tokenizer of an opened model.
///
/// # Errors
///
/// `Model` for one that is missing or cannot be used.
pub fn tokenizer_of(model: &OpenModel) -> Result<Tokenizer> {
    tokenizer_in(model.gguf(), &model.path.weights)
}

/// The tokenizer of a GGUF file, or of a model's directory.
///
/// # Errors
///
/// Errors of [`tokenizer_of`].
pub fn tokenizer_in(gguf: Option<&Gguf>, weights: &Path) -> Result<Tokenizer> {
    match gguf {
        Some(gguf) => Tokenizer::from_gguf(gguf, VOCAB),
        None => Tokenizer::open(weights, VOCAB),
    }
}

/// Location of the chat template of an opened model.
pub fn template_source(model: &OpenModel) -> TemplateSource {
    match model.gguf() {
        Some(gguf) => TemplateSource::from_gguf(gguf),
        None => TemplateSource::from_path(&model.path.weights),
    }
}

/// Sampling options that an opened model recommends for conversations.
#[cfg(feature = "chat")]
fn recommended_sampling(model: &OpenModel) -> Result<SamplerOptions> {
    match model.gguf() {
        Some(gguf) => SamplerOptions::recommended_in_gguf(gguf),
        None => SamplerOptions::recommended_at(&model.path.weights),
    }
}
