//! The errors of requests, with their HTTP and gRPC status. `http` and `grpc` have statuses of
//! their own for faults of the transport.

use downbeat_core::Duration;
use http::StatusCode;

/// Why a request got no result. The message names the defect and the expected value.
#[derive(Debug, Clone, thiserror::Error)]
pub enum ServiceError {
    /// The request cannot be understood or does not fit the model: HTTP 400, `INVALID_ARGUMENT`.
    #[error("{0}")]
    InvalidArgument(String),
    /// No such model, version or region: HTTP 404, `NOT_FOUND`.
    #[error("{0}")]
    NotFound(String),
    /// The name is taken: HTTP 409, `ALREADY_EXISTS`.
    #[error("{0}")]
    AlreadyExists(String),
    /// The body is larger than the server takes: HTTP 413, `RESOURCE_EXHAUSTED`.
    #[error("{0}")]
    TooLarge(String),
    /// The queue is full (rejected at admission): HTTP 503 with `Retry-After`,
    /// `RESOURCE_EXHAUSTED`.
    #[error("{message}")]
    QueueFull {
        /// Which queue, its bound.
        message: String,
        /// When there should be room again.
        retry_after: Duration,
    },
    /// The tenant of the request has had its part of the devices' time: HTTP 429 with `Retry-After`,
    /// `RESOURCE_EXHAUSTED`.
    #[error("{message}")]
    TooMany {
        /// Which tenant, which limit.
        message: String,
        /// When the tenant may send a request again.
        retry_after: Duration,
    },
    /// The deadline cannot be met, or the time the client allowed in the queue is over: HTTP 504,
    /// `DEADLINE_EXCEEDED`.
    #[error("{0}")]
    DeadlineExceeded(String),
    /// The model is not ready, or the server drains: HTTP 503, `UNAVAILABLE`.
    #[error("{0}")]
    Unavailable(String),
    /// Something the protocol has and this server does not: HTTP 501, `UNIMPLEMENTED`.
    #[error("{0}")]
    Unimplemented(String),
    /// The model of this name may give any number of answers, and the call takes one: HTTP 501,
    /// `UNIMPLEMENTED`. The message is for gRPC, and partly in Triton's words.
    #[error(
        "ModelInfer RPC doesn't support models with decoupled transaction policy; send requests for model '{0}' by \
         ModelStreamInfer"
    )]
    Decoupled(String),
    /// The engine or the server failed: HTTP 500, `INTERNAL`.
    #[error("{0}")]
    Internal(String),
}

impl ServiceError {
    /// The same error, with its subject in front of its message.
    pub fn within(mut self, context: impl std::fmt::Display) -> Self {
        let message = match &mut self {
            ServiceError::InvalidArgument(message)
            | ServiceError::NotFound(message)
            | ServiceError::AlreadyExists(message)
            | ServiceError::TooLarge(message)
            | ServiceError::QueueFull { message, .. }
            | ServiceError::TooMany { message, .. }
            | ServiceError::DeadlineExceeded(message)
            | ServiceError::Unavailable(message)
            | ServiceError::Unimplemented(message)
            | ServiceError::Internal(message) => message,
            ServiceError::Decoupled(_) => return self,
        };
        *message = format!("{context}: {message}");
        self
    }

    /// The number of the error's kind in messages from backends to frontends. Earlier versions used
    /// 6 for another kind.
    pub fn code(&self) -> u16 {
        match self {
            ServiceError::InvalidArgument(_) => 0,
            ServiceError::NotFound(_) => 1,
            ServiceError::AlreadyExists(_) => 2,
            ServiceError::TooLarge(_) => 3,
            ServiceError::QueueFull { .. } => 4,
            ServiceError::DeadlineExceeded(_) => 5,
            ServiceError::Unavailable(_) => 7,
            ServiceError::Unimplemented(_) | ServiceError::Decoupled(_) => 8,
            ServiceError::Internal(_) => 9,
            ServiceError::TooMany { .. } => 10,
        }
    }

    /// The error of this [`ServiceError::code`]; one of a code that is not known is internal.
    pub fn of_code(code: u16, message: String) -> Self {
        match code {
            0 => ServiceError::InvalidArgument(message),
            1 => ServiceError::NotFound(message),
            2 => ServiceError::AlreadyExists(message),
            3 => ServiceError::TooLarge(message),
            4 => ServiceError::QueueFull { message, retry_after: Duration::ZERO },
            5 => ServiceError::DeadlineExceeded(message),
            7 => ServiceError::Unavailable(message),
            8 => ServiceError::Unimplemented(message),
            10 => ServiceError::TooMany { message, retry_after: Duration::ZERO },
            _ => ServiceError::Internal(message),
        }
    }

    /// The status of an HTTP answer with this error, and the code over gRPC.
    fn status(&self) -> (StatusCode, tonic::Code) {
        match self {
            ServiceError::InvalidArgument(_) => (StatusCode::BAD_REQUEST, tonic::Code::InvalidArgument),
            ServiceError::NotFound(_) => (StatusCode::NOT_FOUND, tonic::Code::NotFound),
            ServiceError::AlreadyExists(_) => (StatusCode::CONFLICT, tonic::Code::AlreadyExists),
            ServiceError::TooLarge(_) => (StatusCode::PAYLOAD_TOO_LARGE, tonic::Code::ResourceExhausted),
            ServiceError::QueueFull { .. } => (StatusCode::SERVICE_UNAVAILABLE, tonic::Code::ResourceExhausted),
            ServiceError::TooMany { .. } => (StatusCode::TOO_MANY_REQUESTS, tonic::Code::ResourceExhausted),
            ServiceError::DeadlineExceeded(_) => (StatusCode::GATEWAY_TIMEOUT, tonic::Code::DeadlineExceeded),
            ServiceError::Unavailable(_) => (StatusCode::SERVICE_UNAVAILABLE, tonic::Code::Unavailable),
            ServiceError::Unimplemented(_) | ServiceError::Decoupled(_) => {
                (StatusCode::NOT_IMPLEMENTED, tonic::Code::Unimplemented)
            }
            ServiceError::Internal(_) => (StatusCode::INTERNAL_SERVER_ERROR, tonic::Code::Internal),
        }
    }

    /// The gRPC status code.
    pub fn grpc_code(&self) -> tonic::Code {
        self.status().1
    }

    /// The status of an HTTP answer with this error.
    pub fn http_status(&self) -> StatusCode {
        self.status().0
    }

    /// The value of `Retry-After`, in whole seconds, rounded up; `None` if trying again later is
    /// not the remedy.
    pub fn retry_after_seconds(&self) -> Option<u64> {
        match self {
            ServiceError::QueueFull { retry_after, .. } | ServiceError::TooMany { retry_after, .. } => {
                Some(retry_after.as_nanos().div_ceil(1_000_000_000).max(1))
            }
            _ => None,
        }
    }
}

impl From<ServiceError> for tonic::Status {
    /// A full queue also tells when to come back: `retry-after` in whole seconds (rounded up), as
    /// over HTTP, and `grpc-retry-pushback-ms`, which gRPC clients with a retry policy heed.
    fn from(error: ServiceError) -> Self {
        let mut status = tonic::Status::new(error.grpc_code(), error.to_string());
        if let ServiceError::QueueFull { retry_after, .. } | ServiceError::TooMany { retry_after, .. } = error {
            let nanos = retry_after.as_nanos();
            let metadata = status.metadata_mut();
            metadata.insert("retry-after", nanos.div_ceil(1_000_000_000).max(1).into());
            metadata.insert("grpc-retry-pushback-ms", nanos.div_ceil(1_000_000).into());
        }
        status
    }
}
