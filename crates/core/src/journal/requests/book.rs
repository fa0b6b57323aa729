//! The book of clients' requests.

use super::record::RequestInput;
use crate::ids::{ModelId, RequestId};
use crate::journal::machine::{Machine, MachineKind, NoDecision, Record, Records};
use crate::journal::names::QueueName;
use crate::time::Time;

/// Knows how many models were named.
///
/// The book decides nothing. It refuses an input about a model without a name.
#[derive(Debug, Default)]
pub struct RequestBook {
    models: u32,
}

/// The reason why an input does not follow from the inputs before.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BadRequestInput {
    /// No model has this number.
    #[error("no model has the number {0}")]
    NoModel(u32),
    /// The numbers of models are not in order.
    #[error("the next model has the number {expected}, not {got}")]
    Order {
        /// The next number.
        expected: u32,
        /// The number in the input.
        got: u32,
    },
}

/// The records of clients' requests. They have no short forms.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RequestRecords;

impl Records for RequestRecords {
    type Input = RequestInput;
    type Reply = Result<(), BadRequestInput>;
    type Refusal = String;
    type Decision = NoDecision;

    fn are_of(machine: MachineKind) -> bool {
        machine == MachineKind::Requests
    }

    fn refusal(reply: &Self::Reply) -> Option<String> {
        reply.err().map(|error| error.to_string())
    }

    fn model_of(record: &Record<Self>) -> Option<ModelId> {
        match record {
            Record::Input(
                _,
                RequestInput::Model(model, _)
                | RequestInput::Came { model, .. }
                | RequestInput::Failed { model, .. }
                | RequestInput::Went { model, .. },
            ) => Some(ModelId(*model)),
            _ => None,
        }
    }

    fn is_setup(input: &RequestInput) -> bool {
        matches!(input, RequestInput::Model(..))
    }

    fn name_in(input: &RequestInput) -> Option<(ModelId, QueueName)> {
        let RequestInput::Model(model, name) = input else { return None };
        Some((ModelId(*model), QueueName { model: name.clone(), ..QueueName::default() }))
    }

    fn request_in(input: &RequestInput) -> Option<RequestId> {
        match input {
            RequestInput::Came { request, .. }
            | RequestInput::Failed { request, .. }
            | RequestInput::Went { request, .. } => Some(*request),
            RequestInput::Model(..) => None,
        }
    }
}

impl Machine for RequestBook {
    type Records = RequestRecords;

    fn kind(&self) -> MachineKind {
        MachineKind::Requests
    }

    fn apply(&mut self, _now: Time, input: RequestInput) -> Result<(), BadRequestInput> {
        match input {
            RequestInput::Model(got, _) if got != self.models => {
                Err(BadRequestInput::Order { expected: self.models, got })
            }
            RequestInput::Model(..) => {
                self.models += 1;
                Ok(())
            }
            RequestInput::Came { model, .. }
            | RequestInput::Failed { model, .. }
            | RequestInput::Went { model, .. } => {
                if model < self.models {
                    Ok(())
                } else {
                    Err(BadRequestInput::NoModel(model))
                }
            }
        }
    }

    fn poll(&mut self) -> Option<NoDecision> {
        None
    }
}
