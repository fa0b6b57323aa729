//! `downbeat infer`: fills a model's inputs from files, texts and values, and prints the answer for
//! people. Without any of these the command prints example requests.

mod answer;
mod batches;
mod csv_rows;
mod example;
mod json_values;
mod npy;
mod picture;
mod save;
mod sources;
mod values;
mod wanted;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use bytes::Bytes;
use clap::Args;
use downbeat_bench::client::{Client, Refused};
use downbeat_core::file_content;
use downbeat_protocol::http::{ModelMetadataBody, model_path};
use downbeat_protocol::{InferRequest, InferResponse, InferTensor, Parameter, RequestedOutput};
use downbeat_report::{note, out};
use downbeat_repository::{few, nearest};
use serde_json::Value;

use self::example::{Place, Program};
use self::picture::Pixels;
use self::save::{OutputFile, parse_output};
use self::sources::Source;
use self::wanted::Wanted;

/// The server that the command asks if the user names none.
const DEFAULT_URL: &str = "http://localhost:8000";

/// Ask a model, with a picture, a table, an array, a text or values as its input
///
/// Without an input the command prints an example request for curl, Python and itself.
#[derive(Args, Debug)]
pub struct InferArgs {
    /// The model
    model: String,
    /// Files with the model's input; - for standard input. They may be pictures (PNG, JPEG), tables
    /// (.csv), NumPy arrays (.npy, .npz), texts (.txt) or JSON (a request, values by input, rows)
    #[arg(value_name = "FILE", conflicts_with = "request")]
    files: Vec<PathBuf>,
    /// A file or a value for one input: age=42, x=1,2.5,3 or image=photo.png
    #[arg(long = "input", value_name = "NAME=VALUE", conflicts_with = "request")]
    inputs: Vec<String>,
    /// A text, for models that take texts; several texts are several rows
    #[arg(long = "text", value_name = "TEXT", conflicts_with = "request")]
    texts: Vec<String>,
    /// The body of an inference request, which is sent unchanged; - for standard input
    #[arg(long, value_name = "FILE")]
    request: Option<PathBuf>,
    /// Print the example request for one program only, ready for its interpreter
    #[arg(long, value_name = "PROGRAM", conflicts_with_all = ["request", "files", "inputs", "texts", "json", "output"])]
    example: Option<Program>,
    /// The range of a picture's samples; without it the model's configuration decides, then its
    /// datatype: unit for floating-point numbers, raw for integers
    #[arg(long, value_name = "RANGE")]
    pixels: Option<Pixels>,
    /// The server
    #[arg(long, value_name = "URL", default_value = DEFAULT_URL, env = "DOWNBEAT_URL")]
    url: String,
    /// The model's version; without it the server chooses
    #[arg(long, value_name = "VERSION", default_value = "")]
    model_version: String,
    /// Number of the likeliest classes to show
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    top: u32,
    /// Print the answer as the JSON of the protocol
    #[arg(long)]
    json: bool,
    /// Write the outputs to a file instead: .npy (one output), .npz, .json or .csv
    #[arg(long, value_name = "FILE", value_parser = parse_output, conflicts_with = "json")]
    output: Option<OutputFile>,
    /// How long to wait for each answer
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = crate::options::units::parse_seconds)]
    timeout: downbeat_core::Duration,
}

/// Runs the command.
///
/// # Errors
/// If a file cannot be read or does not fit the model, or the server refuses.
pub fn run(args: &InferArgs) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let Some(response) = runtime.block_on(ask(args))? else { return Ok(()) };
    if let Some(file) = &args.output {
        return file.write(&response);
    }
    if args.json {
        return Ok(out().write_all(&save::json(&response)?)?);
    }
    Ok(answer::show(&response, args.top as usize, &mut out())?)
}

/// Sends the user's input. Without one, prints an example and returns `None`.
async fn ask(args: &InferArgs) -> anyhow::Result<Option<InferResponse>> {
    let limit = Duration::from(args.timeout);
    let path = model_path(&args.model, &args.model_version);
    if let Some(file) = &args.request {
        let body = read_body(file)?;
        let mut client = Client::connect(&args.url, limit).await?;
        return Ok(Some(client.infer_body(&format!("{path}/infer"), body, None).await?));
    }
    let sources = read_sources(args)?;
    let mut client = Client::connect(&args.url, limit).await?;
    if let [source] = sources.as_slice()
        && let Some(body) = source.body()
    {
        return Ok(Some(client.infer_body(&format!("{path}/infer"), body.clone(), None).await?));
    }
    let metadata: ModelMetadataBody = match client.get(&path).await {
        Ok(metadata) => metadata,
        Err(error) => return Err(with_names(error, &mut client, &args.model).await),
    };
    // The server may lack this extension. Then there are no labels, no scale and no steps, and the
    // request works without them.
    let config: Value = client.get(&format!("{path}/config")).await.unwrap_or(Value::Null);
    let wanted = Wanted::new(&args.model, &metadata, &config)?;
    if sources.is_empty() {
        return print_example(args, &mut client, &wanted).await.map(|()| None);
    }
    let inputs = sources::fill(sources, &wanted, args.pixels)?;
    send(args, &mut client, &wanted, inputs).await.map(Some)
}

fn read_sources(args: &InferArgs) -> anyhow::Result<Vec<Source>> {
    let files = args.files.iter().map(|file| Source::file(file));
    let inputs = args.inputs.iter().map(|input| Source::named(input));
    files.chain(inputs).chain(args.texts.iter().map(|text| Ok(Source::text(text)))).collect()
}

fn read_body(file: &Path) -> anyhow::Result<Bytes> {
    let body = Bytes::from(sources::read_file(file)?);
    let text = file_content::text(&body).map_err(|error| anyhow!("{} {error}", file.display()))?;
    json_values::with_words(text).with_context(|| format!("{} is not JSON", file.display()))?;
    Ok(body.slice_ref(text.as_bytes()))
}

/// Sends all rows, in as many requests as the model needs.
async fn send(
    args: &InferArgs,
    client: &mut Client,
    wanted: &Wanted,
    inputs: Vec<InferTensor>,
) -> anyhow::Result<InferResponse> {
    let parts = batches::split(inputs, wanted.rows)?;
    let (mut answers, mut rows) = (Vec::with_capacity(parts.len()), Vec::with_capacity(parts.len()));
    if parts.len() > 1 {
        note(format_args!("{} requests, since the model takes fewer rows at once", parts.len()));
    }
    for inputs in parts {
        rows.push(inputs.first().and_then(|input| input.shape.first()).copied().unwrap_or(1));
        let request = InferRequest {
            model_name: args.model.clone(),
            model_version: args.model_version.clone(),
            inputs,
            outputs: labelled(args, wanted),
            ..InferRequest::default()
        };
        answers.push(client.infer(&request).await?);
    }
    batches::join(answers, &rows)
}

/// Requests all outputs. An output with labels gives its likeliest classes, but files and JSON have
/// the values themselves.
fn labelled(args: &InferArgs, wanted: &Wanted) -> Vec<RequestedOutput> {
    if args.json || args.output.is_some() || wanted.labelled.is_empty() {
        return Vec::new();
    }
    let output = |name: &String| {
        let classes = ("classification".to_owned(), Parameter::Int64(i64::from(args.top)));
        let parameters = wanted.labelled.contains(name).then_some(classes).into_iter().collect();
        RequestedOutput { name: name.clone(), parameters }
    };
    wanted.outputs.iter().map(|wanted| output(&wanted.name)).collect()
}

/// Adds the names of the server's models to its answer that it has no such model.
async fn with_names(error: anyhow::Error, client: &mut Client, model: &str) -> anyhow::Error {
    let is_unknown = error.downcast_ref::<Refused>().is_some_and(|refused| refused.status == 404);
    if !is_unknown {
        return error;
    }
    let Ok(index) = client.post::<Value>("/v2/repository/index").await else { return error };
    let models = index.as_array().into_iter().flatten();
    let mut names: Vec<&str> = models.filter_map(|entry| entry.get("name").and_then(Value::as_str)).collect();
    names.dedup();
    let said = error.to_string();
    let mut words = String::new();
    if let Some(near) = nearest(model, names.iter().copied()).filter(|near| !said.contains(&format!("'{near}'"))) {
        words = format!("; did you mean '{near}'?");
    }
    if names.iter().any(|name| !said.contains(name)) {
        words += &format!(" The server has: {}", few(&names));
    }
    anyhow!("{said}{words}")
}

/// Prints an example that the server has answered.
async fn print_example(args: &InferArgs, client: &mut Client, wanted: &Wanted) -> anyhow::Result<()> {
    let place = Place { url: &args.url, model: &args.model, version: &args.model_version };
    let mut candidates = example::candidates(place, wanted)?.into_iter().peekable();
    let first = candidates.peek().cloned().context("the model has no example")?;
    let mut refused = None;
    let mut answered = None;
    for request in candidates {
        match client.infer(&request).await {
            Ok(answer) => {
                answered = Some((request, answer));
                break;
            }
            Err(error) if error.is::<Refused>() => refused = refused.or(Some(error)),
            Err(error) => return Err(error),
        }
    }
    let (request, answer) = match answered {
        Some((request, answer)) => (request, Some(answer)),
        None => (first, None),
    };
    let mut out = out();
    if let Some(program) = args.example {
        write!(out, "{}", example::text(program, place, &request, wanted)?)?;
    } else {
        writeln!(out, "{}\n", wanted.introduction())?;
        for (title, program) in
            [("curl", Program::Curl), ("Python (pip install requests)", Program::Python), ("downbeat", Program::Infer)]
        {
            writeln!(out, "# {title}\n{}", example::text(program, place, &request, wanted)?)?;
        }
        if let Some(answer) = &answer {
            writeln!(out, "The server has answered this example:")?;
            answer::show(answer, args.top as usize, &mut out)?;
        }
    }
    match (answer, refused) {
        (None, Some(refused)) => {
            bail!("the server does not answer this example, whose values you must change: {refused}")
        }
        _ => Ok(()),
    }
}
