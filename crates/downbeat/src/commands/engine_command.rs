//! `downbeat engine`: lists the engines that can be used here, and installs onnxruntime, which is
//! faster than the built-in engine.

use std::path::PathBuf;
use std::sync::Arc;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand};
use downbeat_engine::{Emulated, Engine};
use downbeat_engine_ort::cuda::OLDEST_DRIVER;
use downbeat_engine_ort::install::{GpuInstall, Install, NvidiaLibraries};
use downbeat_engine_ort::preflight::{Survey, survey};
use downbeat_engine_ort::{CudaOptions, Preference, Search};
use downbeat_report::{note, say};
use downbeat_repository::ModelFormat;
use downbeat_service::options::EngineChoice;

/// List engines, or install onnxruntime.
#[derive(Subcommand, Debug)]
pub enum EngineCommand {
    /// List the engines that can be used here, the fastest first
    List,
    /// Fetch the onnxruntime library with pip into the user's cache folder, for the CPU or with
    /// --cuda for NVIDIA GPUs
    Install(InstallArgs),
}

/// Arguments of `downbeat engine install`.
#[derive(Args, Debug)]
pub struct InstallArgs {
    /// Version of onnxruntime [default: the version that this program was tested with]
    #[arg(long, value_name = "VERSION")]
    version: Option<String>,
    /// The Python whose pip fetches the library [default: python3]
    #[arg(long, value_name = "FILE")]
    python: Option<PathBuf>,
    /// A wheel to unpack that was fetched elsewhere
    #[arg(long, value_name = "FILE")]
    wheel: Option<PathBuf>,
    /// Accept a wheel of pip's index even if this program does not know its hash
    #[arg(long)]
    unverified: bool,
    /// For NVIDIA GPUs; both this and the library for the CPU may be installed
    #[arg(long)]
    cuda: bool,
    /// Whether to fetch NVIDIA's libraries, too (CUDA, cuDNN; more than 1 GB): missing (if one is
    /// missing on this machine), always, or never
    #[arg(long, value_name = "WHEN", requires = "cuda", default_value = "missing", value_parser = libraries())]
    cuda_libraries: NvidiaLibraries,
}

fn libraries() -> impl TypedValueParser<Value = NvidiaLibraries> {
    PossibleValuesParser::new(["missing", "always", "never"]).map(|when| match &*when {
        "always" => NvidiaLibraries::Always,
        "never" => NvidiaLibraries::Never,
        _ => NvidiaLibraries::Missing,
    })
}

/// The value of `--engine`.
pub fn engine_choice() -> impl TypedValueParser<Value = EngineChoice> {
    PossibleValuesParser::new(EngineChoice::names()).try_map(|name| name.parse::<EngineChoice>())
}

/// The engine for models of this format. Prints hints and warnings about the choice.
///
/// # Errors
/// If the wanted engine cannot be used.
pub fn engine_for(format: ModelFormat, wanted: EngineChoice, search: &Search) -> anyhow::Result<Arc<dyn Engine>> {
    Ok(match format {
        ModelFormat::Emulated => Arc::new(Emulated::new()),
        ModelFormat::Python => {
            anyhow::bail!("this command measures ONNX models; a server measures Python models at load")
        }
        ModelFormat::Onnx => {
            let preference: Preference = wanted.name().parse().map_err(anyhow::Error::msg)?;
            let choice = downbeat_engine_ort::choose(preference, search, &CudaOptions::default())?;
            for line in choice.hint.iter().chain(&choice.warning) {
                note(line);
            }
            choice.engine
        }
    })
}

/// Runs the command.
///
/// # Errors
/// If the library cannot be fetched or written.
pub fn run(command: &EngineCommand) -> anyhow::Result<()> {
    match command {
        EngineCommand::List => {
            let search = Search::from_env();
            print_gpus(&survey(&search, &CudaOptions::default()))?;
            for info in downbeat_engine_ort::available(&search) {
                let library = info.library.map_or_else(|| "built in".to_owned(), |path| path.display().to_string());
                say(format_args!("{:<12} {:<10} {:<6} {library}", info.name, info.version, info.device))?;
            }
        }
        EngineCommand::Install(args) => {
            let mut install = Install::new()?;
            if let Some(version) = &args.version {
                install.version.clone_from(version);
            }
            if let Some(python) = &args.python {
                install.python.clone_from(python);
            }
            install.wheel.clone_from(&args.wheel);
            install.unverified = args.unverified;
            let libraries = args.cuda_libraries;
            install.gpu = args.cuda.then(|| GpuInstall { libraries, search: Search::from_env() });
            let installed = install.run(&mut |what| note(what))?;
            if let Some(folder) = installed.nvidia {
                say(format_args!("NVIDIA's libraries are in {}", folder.display()))?;
            }
            let what = if args.cuda { "onnxruntime for NVIDIA GPUs" } else { "onnxruntime" };
            let (version, library) = (installed.version, installed.library.display());
            let first = if args.cuda { None } else { Search::from_env().environment_libraries().next() };
            let found = first.map_or_else(
                || "`downbeat serve` finds it there".to_owned(),
                |first| format!("`downbeat serve` takes it if ORT_DYLIB_PATH names it, and else {}", first.display()),
            );
            say(format_args!("{what} {version} is in {library}; {found}"))?;
        }
    }
    Ok(())
}

/// Prints whether the engine for GPUs can be used, the GPUs, and the missing parts.
fn print_gpus(survey: &Survey) -> std::io::Result<()> {
    let Survey { driver, library, libraries } = survey;
    let missing = [driver.as_ref().err(), library.as_ref().err(), libraries.as_ref().err()];
    match (driver, library) {
        (Ok(_), Ok(library)) if missing.iter().all(Option::is_none) => {
            let version = downbeat_engine_ort::install::version_of(library).unwrap_or_default();
            say(format_args!("{:<12} {version:<10} {:<6} {}", "cuda", "gpu", library.display()))?;
        }
        // A machine without GPUs is not a fault, so one line is enough.
        (Err(reason), _) => say(format_args!("{:<12} cannot be used: {reason}", "cuda"))?,
        _ => say(format_args!("{:<12} cannot be used yet", "cuda"))?,
    }
    if let Ok(driver) = driver {
        say(format_args!("  the driver supports CUDA {} (needed: {OLDEST_DRIVER})", driver.version))?;
        driver.gpus.iter().try_for_each(|gpu| say(format_args!("  {gpu}")))?;
        missing.into_iter().flatten().try_for_each(|reason| say(format_args!("  {reason}")))?;
    }
    Ok(())
}
