//! A process's view of its whole cluster: it asks all others by the leading scheduler, and puts
//! their answers together.

pub(crate) mod answers;
pub(crate) mod asks;
pub(crate) mod ledger;
pub(crate) mod question;

use downbeat_core::Duration;
use downbeat_roles::{ClockLead, NodeId, Role};
use downbeat_service::clock::Clock;
use downbeat_service::error::ServiceError;
use downbeat_service::report::cluster_report::{ClusterReport, ClusterStatistics, ClusterView};
use downbeat_service::report::live::LiveReport;
use downbeat_service::report::policy_report::{BackendPolicy, PolicyReport};
use downbeat_service::report::timeline::{REMEMBERED, Timeline, TimelineBackend, rules};
use futures_util::future::{BoxFuture, FutureExt};
use parking_lot::Mutex;
use tokio::sync::mpsc;

use self::answers::Answerer;
use self::asks::{FarQuestion, Part, SAME, ViewEvent};
use self::ledger::{Ledger, Sums};
use self::question::{Answer, Question};
use crate::node::Identity;
use crate::node::status::StatusBoard;

/// How long the processes of the cluster may take for their answers.
const WITHIN: Duration = Duration::from_millis(2_000);

/// A process's view of its whole cluster.
pub struct View {
    /// The name of the server in reports.
    pub server: String,
    pub clock: Clock,
    pub me: Me,
    pub board: StatusBoard,
    /// Hands an event to the process's node. Returns false if the node has ended.
    pub send: Box<dyn Fn(ViewEvent) -> bool + Send + Sync>,
    /// Answers for this process; `None`: it has no figures (a scheduler).
    pub answerer: Option<Answerer>,
    pub ledger: Mutex<Ledger>,
}

/// The process itself among the others.
#[derive(Clone)]
pub struct Me {
    pub node: NodeId,
    pub role: Role,
    pub name: String,
}

impl Me {
    /// The process of this identity.
    pub fn of(Identity { node, role, name, .. }: &Identity) -> Self {
        Me { node: *node, role: *role, name: name.clone() }
    }
}

/// The answers to a question.
struct Gathered {
    parts: Vec<(Part, Answer)>,
    /// Whether all processes that the leader is connected to have answered.
    is_whole: bool,
}

impl View {
    /// The view of a process with figures. From now on the process answers the questions of `asked`.
    pub fn answering(
        (server, clock, me, board): (String, Clock, Me, StatusBoard),
        (asked, answerer): (mpsc::UnboundedReceiver<FarQuestion>, Answerer),
        send: impl Fn(ViewEvent) -> bool + Clone + Send + Sync + 'static,
    ) -> Self {
        tokio::spawn(answers::answer(asked, answerer.clone(), send.clone()));
        View { server, clock, me, board, send: Box::new(send), answerer: Some(answerer), ledger: Mutex::default() }
    }

    /// Asks this process and all others.
    async fn gather(&self, question: Question) -> Gathered {
        let (sender, mut receiver) = mpsc::unbounded_channel();
        // A node that has ended drops the sender.
        (self.send)(ViewEvent::Ask(question.pack(), sender));
        let mut parts = Vec::new();
        if let Some(answerer) = self.answerer.clone() {
            let asked = question.clone();
            let own = tokio::task::spawn_blocking(move || answerer(&asked)).await;
            let Me { node, role, name } = self.me.clone();
            let clock = Some(SAME);
            let answer = own.unwrap_or_else(|error| Answer::Failed(error.to_string()));
            parts.push((Part { node, role, name, clock, answer: Vec::new() }, answer));
        }
        let others = async {
            let mut is_whole = false;
            while let Some(part) = receiver.recv().await {
                let Some(mut part) = part else {
                    is_whole = true;
                    break;
                };
                let packed = std::mem::take(&mut part.answer);
                let answer = tokio::task::spawn_blocking(move || Answer::unpack(&packed)).await;
                let answer = answer.unwrap_or_else(|error| Answer::Failed(error.to_string()));
                if let Answer::Failed(reason) = &answer {
                    tracing::warn!(process = %part.name, %reason, "a process has no answer about the cluster");
                }
                parts.push((part, answer));
            }
            is_whole
        };
        let is_whole = tokio::time::timeout(WITHIN.into(), others).await.unwrap_or(false);
        parts.sort_by(|(a, _), (b, _)| (&a.name, a.node).cmp(&(&b.name, b.node)));
        name_apart(&mut parts);
        Gathered { parts, is_whole }
    }

    async fn live_report(&self, history: bool) -> LiveReport {
        let gathered = self.gather(Question::Live { history }).await;
        let is_there = |(part, answer)| match answer {
            Answer::Live(report) => Some((part, report)),
            _ => None,
        };
        let reports = gathered.parts.into_iter().filter_map(is_there).collect();
        let now = self.clock.now();
        let mut ledger = self.ledger.lock();
        ledger.take_live(now, reports, gathered.is_whole);
        let Sums { models, tenants, devices, processes } = ledger.live();
        let (device_names, device_busy_s) = devices.into_iter().unzip();
        LiveReport {
            models,
            device_busy_s,
            tenants,
            in_cluster: true,
            device_names,
            processes,
            ..LiveReport::new(&self.server, now)
        }
    }

    async fn whole_timeline(&self, last: Duration) -> Timeline {
        let last = last.min(REMEMBERED);
        let now = self.clock.now();
        let Gathered { parts, .. } = self.gather(Question::Timeline { last }).await;
        let from_ns = now.as_nanos().saturating_sub(last.as_nanos());
        let (mut devices, mut backends) = (Vec::new(), Vec::new());
        for (part, answer) in parts {
            let Answer::Timeline { timeline, is_whole } = answer else { continue };
            let backend = part.name;
            let error_ns = part.clock.map(|clock| clock.error.as_nanos());
            backends.push(TimelineBackend { backend: backend.clone(), error_ns, complete: is_whole });
            let Some(ClockLead { ahead, .. }) = part.clock else { continue };
            devices.extend(timeline.devices.into_iter().map(|mut past| {
                past.shift(ahead);
                past.launches.retain(|launch| launch.end_ns >= from_ns);
                past.backend.clone_from(&backend);
                past
            }));
        }
        Timeline { from_ns, now_ns: self.clock.now().as_nanos(), devices, rules: rules(), backends }
    }

    async fn whole_statistics(&self) -> ClusterStatistics {
        let gathered = self.gather(Question::Statistics).await;
        let is_there = |(part, answer)| match answer {
            Answer::Statistics(models) => Some((part, models)),
            _ => None,
        };
        let reports = gathered.parts.into_iter().filter_map(is_there).collect();
        let mut ledger = self.ledger.lock();
        ledger.take_statistics(self.clock.now(), reports, gathered.is_whole);
        ledger.statistics()
    }

    async fn policy_of(&self, model: &str, version: &str) -> Result<PolicyReport, ServiceError> {
        let question = Question::Policy { model: model.to_owned(), version: version.to_owned() };
        let (mut reports, mut failed) = (Vec::new(), None);
        for (part, answer) in self.gather(question).await.parts {
            match answer {
                Answer::Policy(Ok(report)) => reports.push(BackendPolicy { backend: part.name, report: *report }),
                // A backend without the model says nothing about the others.
                Answer::Policy(Err((code, message))) => failed = failed.or(Some(ServiceError::of_code(code, message))),
                _ => {}
            }
        }
        let Some(BackendPolicy { report: first, .. }) = reports.first().cloned() else {
            let reason = || {
                format!("no backend has told the device policy of model '{model}' (GET /v2/cluster has the backends)")
            };
            return Err(failed.unwrap_or_else(|| ServiceError::Unavailable(reason())));
        };
        let words = |report: &PolicyReport| (report.policy.clone(), report.asked.clone(), report.asked_for);
        let is_alike = reports.iter().all(|one| words(&one.report) == words(&first));
        Ok(PolicyReport { backends: if is_alike { Vec::new() } else { reports }, ..first })
    }
}

/// Makes equal names of processes unlike: `backend 1` in two containers.
fn name_apart(parts: &mut [(Part, Answer)]) {
    for place in 1..parts.len() {
        let [.., (before, _), (part, _)] = &mut parts[..=place] else { continue };
        if before.name == part.name || before.name.strip_suffix(&suffix(before.node)) == Some(&part.name) {
            let shared = part.name.clone();
            if before.name == shared {
                before.name += &suffix(before.node);
            }
            part.name += &suffix(part.node);
        }
    }
}

/// The words that tell a process from others of its name.
fn suffix(node: NodeId) -> String {
    format!(" ({})", crate::node::status::shown(node))
}

impl ClusterView for View {
    fn report(&self) -> ClusterReport {
        self.board.status()
    }

    fn live(&self, history: bool) -> BoxFuture<'_, LiveReport> {
        self.live_report(history).boxed()
    }

    fn timeline(&self, last: Duration) -> BoxFuture<'_, Timeline> {
        self.whole_timeline(last).boxed()
    }

    fn statistics(&self) -> BoxFuture<'_, ClusterStatistics> {
        self.whole_statistics().boxed()
    }

    fn policy<'a>(
        &'a self,
        model: &'a str,
        version: &'a str,
    ) -> BoxFuture<'a, Option<Result<PolicyReport, ServiceError>>> {
        match self.me.role {
            Role::Backend => std::future::ready(None).boxed(),
            _ => async { Some(self.policy_of(model, version).await) }.boxed(),
        }
    }
}
