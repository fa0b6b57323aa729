//! `downbeat log why`: the story of one request.

use std::fmt;
use std::path::PathBuf;

use anyhow::bail;
use clap::Args;
use downbeat_core::RequestId;
use downbeat_core::journal::requests::Trace;
use downbeat_report::say;
use downbeat_sim::why::{Asked, ClusterStory, LogFolder, NotFound, Story};
use serde::Serialize;

use super::time::{LogTime, told};
use crate::run_output::waiting;

/// Tell in one paragraph why a request was dropped, late or in time. The paragraph has the requests
/// that waited before, the batch, and the changes that would have saved the request. The server may
/// write the log meanwhile.
#[derive(Args, Debug)]
pub struct WhyArgs {
    /// The id that the client gave the request, or the request's number in the log, such as r17. A trace
    /// (32 hexadecimal digits, or a `traceparent`) finds its request. A time such as 14:05:03 (UTC) or 5m
    /// (ago) finds the first request that failed in the second from then on
    #[arg(value_name = "ID|TRACE|TIME")]
    asked: String,

    /// The folder that `downbeat serve --decision-log` writes
    #[arg(default_value = "decisions")]
    folder: PathBuf,

    /// Only requests of this model
    #[arg(long, value_name = "NAME")]
    model: Option<String>,

    /// Print the story as JSON, with times in milliseconds
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// If the log cannot be read or has no such request.
pub fn run(args: &WhyArgs) -> anyhow::Result<()> {
    let folder = LogFolder::open(&args.folder)?;
    let story = waiting(false, "reading the log", || story(&folder, args))?;
    if args.json {
        say(serde_json::to_string(&story)?)?
    } else {
        say(&story)?
    }
    Ok(())
}

/// The story of a request of a server, or of a cluster.
#[derive(Serialize)]
#[serde(untagged)]
enum Told {
    Server(Box<Story>),
    Cluster(Box<ClusterStory>),
}

impl fmt::Display for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Told::Server(story) => story.fmt(f),
            Told::Cluster(story) => story.fmt(f),
        }
    }
}

/// The story of the request that the first of the readings finds.
fn story(folder: &LogFolder, args: &WhyArgs) -> anyhow::Result<Told> {
    let mut last = None;
    for asked in readings(folder, &args.asked)? {
        let model = args.model.as_deref();
        let found = match folder.is_of_frontend() {
            true => folder.why_in_cluster(&asked, model).map(|story| Told::Cluster(Box::new(story))),
            false => folder.why(&asked, model).map(|story| Told::Server(Box::new(story))),
        };
        match found {
            Ok(story) => return Ok(story),
            Err(NotFound::Log(error)) => return Err(error.into()),
            // The last reading is the one that fits the form of the word best.
            Err(error) => last = Some(error),
        }
    }
    let span = told(folder, folder.span()?);
    let Some(error) = last else { bail!("the log has no request '{}'", args.asked) };
    bail!(
        "{error}; the log goes {span}. A request without an id is found by its time, such as \
         `downbeat log why 14:05:03 {}`",
        args.folder.display()
    )
}

/// The things that a word may stand for, the most likely first.
fn readings(folder: &LogFolder, asked: &str) -> anyhow::Result<Vec<Asked>> {
    let mut readings = Vec::new();
    readings.extend(asked.parse().ok().or_else(|| Trace::of_traceparent(asked)).map(Asked::Trace));
    readings.push(Asked::Id(asked.to_owned()));
    let number = asked.strip_prefix('r').and_then(|number| number.parse().ok());
    readings.extend(number.map(|number| Asked::Number(RequestId(number))));
    if let Ok(time) = asked.parse::<LogTime>() {
        let span = folder.span()?;
        let at = time.in_log(folder, span)?;
        if at <= span.until {
            readings.push(Asked::Time(at));
        }
    }
    Ok(readings)
}
