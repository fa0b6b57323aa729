//! Finds a request in a log.

use downbeat_core::journal::cluster::{ClusterRecords, Input};
use downbeat_core::journal::requests::{RequestInput, RequestRecords, Trace, bounded};
use downbeat_core::journal::{MachineKind, Record};
use downbeat_core::{Duration, RequestId, Time};

use super::folder::{BadFolder, LogFolder, Span};
use super::outcome::Outcome;
use super::story::Story;
use super::window::{LoggedRequest, Window};

/// The request that a question is about.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Asked {
    /// The id that the client gave.
    Id(String),
    /// A trace.
    Trace(Trace),
    /// The number of the request in the log.
    Number(RequestId),
    /// The first bad request from this instant on, or the first of all.
    Time(Time),
}

/// The reason why there is no story.
#[derive(Debug, thiserror::Error)]
pub enum NotFound {
    /// The log cannot be read.
    #[error(transparent)]
    Log(#[from] BadFolder),
    /// No request has this name.
    #[error("the log has no request with {0}")]
    Nothing(String),
    /// No request came then.
    #[error("no request{0} came in the {1} from that time on")]
    Quiet(String, Duration),
}

/// A request by its name.
struct Found {
    at: Time,
    request: RequestId,
    /// Requests of the same name, this one included.
    of: usize,
}

/// Before the request: the span in which others may have come that wait.
const BEFORE: Duration = Duration::from_millis(5_000);
/// Behind the request: spans that are tried one after another until its end is found.
const BEHIND: [Duration; 4] = [
    Duration::from_millis(1_000),
    Duration::from_millis(10_000),
    Duration::from_millis(100_000),
    Duration::from_millis(1_000_000),
];
/// The span that a question about a time looks at.
pub(super) const LOOK: Duration = Duration::from_millis(1_000);

impl LogFolder {
    /// The story of the request that is asked for; of several with one name the last. `model`: only
    /// requests of this model.
    ///
    /// # Errors
    /// If the log has no such request, or cannot be read.
    pub fn why(&self, asked: &Asked, model: Option<&str>) -> Result<Story, NotFound> {
        match asked {
            Asked::Time(at) => self.why_at(*at, model),
            Asked::Number(request) => {
                let at =
                    self.arrival_of(*request)?.ok_or_else(|| NotFound::Nothing(format!("the number {request}")))?;
                self.story_of(&Found { at, request: *request, of: 1 }, "this number")
            }
            Asked::Id(id) => {
                let name = format!("the id {id:?}{}", of_model(model));
                let id = bounded(id, RequestInput::MOST_ID);
                let needle = postcard_text(id);
                let found = self.named(&needle, model, |came, _| came == id)?;
                self.story_of(&found.ok_or(NotFound::Nothing(name))?, "this id")
            }
            Asked::Trace(trace) => {
                let name = format!("the trace {trace}{}", of_model(model));
                let found = self.named(&trace.0, model, |_, came| came == Some(*trace))?;
                self.story_of(&found.ok_or(NotFound::Nothing(name))?, "this trace")
            }
        }
    }

    /// The last request with the id or the trace that is asked for, and when it came.
    pub(super) fn found_by_name(&self, asked: &Asked, model: Option<&str>) -> Result<(RequestId, Time), NotFound> {
        let (name, found) = match asked {
            Asked::Trace(trace) => {
                let found = self.named(&trace.0, model, |_, came| came == Some(*trace))?;
                (format!("the trace {trace}{}", of_model(model)), found)
            }
            Asked::Id(id) => {
                let short = bounded(id, RequestInput::MOST_ID);
                let found = self.named(&postcard_text(short), model, |came, _| came == short)?;
                (format!("the id {id:?}{}", of_model(model)), found)
            }
            Asked::Number(_) | Asked::Time(_) => ("a name".to_owned(), None),
        };
        found.map(|found| (found.request, found.at)).ok_or(NotFound::Nothing(name))
    }

    /// The last request with a name in `requests.log`.
    fn named(
        &self,
        needle: &[u8],
        model: Option<&str>,
        is_it: impl Fn(&str, Option<Trace>) -> bool,
    ) -> Result<Option<Found>, BadFolder> {
        let mut all: Vec<(Time, RequestId, u32)> = Vec::new();
        let mut models: Vec<String> = Vec::new();
        for file in self.files.iter().filter(|file| file.machine == MachineKind::Requests) {
            file.read::<RequestRecords>(Span { from: Time::MAX, until: Time::MAX }, |_, entry| {
                if let Record::Input(_, RequestInput::Model(number, name)) = entry.record
                    && number as usize == models.len()
                {
                    models.push(name);
                }
            })?;
            file.search::<RequestRecords>(needle, |at, entry| {
                if let Record::Input(_, RequestInput::Came { request, model, id, trace }) = entry.record
                    && is_it(&id, trace)
                {
                    all.push((at, request, model));
                }
            })?;
        }
        if let Some(wanted) = model {
            all.retain(|(.., model)| models.get(*model as usize).is_some_and(|name| name == wanted));
        }
        let last = all.iter().max().copied();
        Ok(last.map(|(at, request, _)| Found { at, request, of: all.len() }))
    }

    /// When a request arrived at a part of the scheduler; `None`: it never did.
    fn arrival_of(&self, request: RequestId) -> Result<Option<Time>, BadFolder> {
        let mut found = None;
        for file in &self.files {
            if matches!(file.machine, MachineKind::Scheduler | MachineKind::Shard { .. }) {
                file.read::<ClusterRecords>(Span { from: Time::ZERO, until: Time::MAX }, |_, entry| {
                    if let Record::Input(at, Input::Request(its)) = entry.record
                        && its.id == request
                    {
                        found = Some(at);
                    }
                })?;
            }
        }
        Ok(found)
    }

    fn story_of(&self, found: &Found, name: &str) -> Result<Story, NotFound> {
        for (place, behind) in BEHIND.iter().enumerate() {
            let from = Time::from_nanos(found.at.as_nanos().saturating_sub(BEFORE.as_nanos()));
            let window = Window::read(self, Span { from, until: found.at + *behind })?;
            let request = window.get(found.request);
            let has_ended = request.is_some_and(|request| window.outcome_of(request) != Outcome::Open);
            let is_last = place + 1 == BEHIND.len() || found.at + *behind >= self.span()?.until;
            if (has_ended && place > 0)
                || is_last
                || request.is_some_and(|its| has_ended && behind_is_enough(&window, its))
            {
                let request = request.ok_or_else(|| {
                    NotFound::Nothing(format!(
                        "{name} that has reached a queue or has ended: the server writes the log up to a second later"
                    ))
                })?;
                let mut story = Story::of(self, &window, request);
                story.others = found.of - 1;
                story.others_by = name.to_owned();
                return Ok(story);
            }
        }
        Err(NotFound::Nothing(name.to_owned()))
    }

    fn why_at(&self, at: Time, model: Option<&str>) -> Result<Story, NotFound> {
        let from = Time::from_nanos(at.as_nanos().saturating_sub(BEFORE.as_nanos()));
        let window = Window::read(self, Span { from, until: at + LOOK + BEHIND[1] })?;
        let is_wanted = |request: &&LoggedRequest| {
            request.at >= at && request.at < at + LOOK && model.is_none_or(|wanted| request.is_for(wanted))
        };
        let came: Vec<&LoggedRequest> = window.requests.iter().filter(is_wanted).collect();
        let bad: Vec<&&LoggedRequest> = came.iter().filter(|request| window.outcome_of(request).is_bad()).collect();
        let first = bad.first().map(|request| **request).or_else(|| came.first().copied());
        let request = first.ok_or_else(|| NotFound::Quiet(of_model(model), LOOK))?;
        let mut story = Story::of(self, &window, request);
        story.span = Some((came.len(), bad.len()));
        Ok(story)
    }
}

/// Whether a window ends well behind the end of a request.
fn behind_is_enough(window: &Window, request: &LoggedRequest) -> bool {
    window.left_queue(request).is_some()
}

fn of_model(model: Option<&str>) -> String {
    model.map_or(String::new(), |model| format!(" of model '{model}'"))
}

/// A text as `postcard` writes it: its length, then its bytes.
fn postcard_text(text: &str) -> Vec<u8> {
    debug_assert!(text.len() <= RequestInput::MOST_ID, "one byte has the length");
    std::iter::once(text.len() as u8).chain(text.bytes()).collect()
}
