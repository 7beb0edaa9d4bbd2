import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;

/** Posts each line of its input with Java's own client, as it is by default; prints each answer. */
class JavaClient {
    public static void main(String[] arguments) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String body = lines.readLine(); body != null; body = lines.readLine()) {
            HttpRequest request = HttpRequest.newBuilder(URI.create(arguments[0]))
                .header("Authorization", "Bearer " + arguments[1])
                .header("Content-Type", "application/json")
                .POST(HttpRequest.BodyPublishers.ofString(body))
                .build();
            HttpResponse<String> answer =
                client.send(request, HttpResponse.BodyHandlers.ofString());
            System.out.println(answer.statusCode() + " " + answer.body());
        }
    }
}
